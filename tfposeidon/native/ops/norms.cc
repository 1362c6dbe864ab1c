// Registers the op that computes norms, with its signature, shape and documentation.

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfposeidon {
namespace {

REGISTER_OP("TfposeidonL2Norms")
    .Input("tensors: count * float")
    .Output("norms: float")
    .Attr("count: int >= 1")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(c->num_inputs()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Computes the Euclidean norms of tensors of any shapes, in one pass over memory.

tensors: Tensors of any shapes; their squares are summed in 64 bits.
norms: [count].
)doc");

}  // namespace
}  // namespace tfposeidon
