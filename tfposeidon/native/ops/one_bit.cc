// Signatures, shapes and documentation of the ops that make one bit of a value.

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfposeidon {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("TfposeidonOneBitEncode")
    .Input("residual: float")
    .Input("gradient: float")
    .Output("code: int32")
    .Output("new_residual: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle vector;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &vector));
      TF_RETURN_IF_ERROR(c->Merge(vector, c->input(1), &vector));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, vector);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Codes residual + gradient as one bit per value, its sign, and two means for each block of 4096
values. Zeros are in neither mean and stay zeros: in blocks that have some beside other values,
another bit per value says which they are.

residual: [n].
gradient: [n].
code: [ceil(n / 32) + 3 ceil(n / 4096) + zeros]: signs, 32 to a word; then for each block the means
  of its positive and of its negative values, and the number of zeros; then which values are zero.
new_residual: [n]: the difference between the input and what the code stands for.
)doc");

REGISTER_OP("TfposeidonOneBitSum")
    .Input("codes: int32")
    .Output("sum: float")
    .Attr("size: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle codes;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &codes));
      int64_t size;
      TF_RETURN_IF_ERROR(c->GetAttr("size", &size));
      c->set_output(0, c->Vector(size));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sums the vectors that codes of OneBitEncode stand for, in their order.

codes: one after the other.
sum: [size].
)doc");

}  // namespace
}  // namespace tfposeidon
