// Signature, shape and documentation of the op that tells when tensors are there.

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfposeidon {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("TfposeidonTimeAfter")
    .Input("values: T")
    .Output("seconds: double")
    .Attr("T: list(type) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Tells the time at which tensors are there, as `Timestamp` under control dependencies does.

That one is stateful, and `tf.function` lets stateful ops run one after another: behind a Python
function in a backward pass it would tell the time of the last gradient for all. This op is not.

values: Tensors of any types and shapes, which are not read.
seconds: Scalar: seconds since 1970.
)doc");

}  // namespace
}  // namespace tfposeidon
