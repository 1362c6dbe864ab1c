// Registers the op that returns the time at which tensors are ready, with its documentation.

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
Returns the time at which tensors are ready, like `Timestamp` under control dependencies.

`Timestamp` is stateful, and `tf.function` runs stateful ops one after another. After a Python
function in a backward pass, `Timestamp` would return the time of the last gradient for all
gradients. This op is stateless.

values: Tensors of any types and shapes, which are not read.
seconds: Scalar: seconds since 1970.
)doc");

}  // namespace
}  // namespace tfposeidon
