// Registers the selection ops, with signatures, shapes and documentation.

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfposeidon {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Sets the shapes of a selection. Inputs are `vectors` vectors of equal length, then the scalars k
// and seed. Outputs are values and indices of length k, then `kept` vectors of the inputs' length.
absl::Status selection_shapes(InferenceContext* c, int vectors, int kept) {
  ShapeHandle vector;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &vector));
  for (int i = 1; i < vectors; ++i) {
    ShapeHandle other;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &other));
    TF_RETURN_IF_ERROR(c->Merge(vector, other, &vector));
  }
  ShapeHandle scalar;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(vectors + 1), 0, &scalar));
  DimensionHandle k;
  TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(vectors, &k));
  c->set_output(0, c->Vector(k));
  c->set_output(1, c->Vector(k));
  for (int i = 0; i < kept; ++i) c->set_output(2 + i, vector);
  return absl::OkStatus();
}

REGISTER_OP("TfposeidonTopK")
    .Input("x: float")
    .Input("k: int64")
    .Input("seed: int64")
    .Output("values: float")
    .Output("indices: index_type")
    .Attr("method: {'mstopk', 'exact', 'dgc'}")
    .Attr("steps: int >= 0 = 30")
    .Attr("index_type: {int32, int64} = DT_INT32")
    .SetShapeFn([](InferenceContext* c) { return selection_shapes(c, 1, 0); })
    .Doc(R"doc(
Selects the k elements of largest magnitude, in the order of their indices.

NaN and infinity count as larger than all numbers. Methods: exact (ties to the lowest index),
mstopk (Shi et al. 2021, Algorithm 1, with N = steps), dgc (Lin et al. 2018, double sampling).

x: [n].
k: Scalar, 0 <= k <= n.
seed: Scalar; determines the random window of mstopk.
values: [k].
indices: [k]; int32 holds n up to 2^31.
)doc");

REGISTER_OP("TfposeidonErrorFeedbackTopK")
    .Input("residual: float")
    .Input("gradient: float")
    .Input("k: int64")
    .Input("seed: int64")
    .Output("values: float")
    .Output("indices: index_type")
    .Output("new_residual: float")
    .Attr("method: {'mstopk', 'exact', 'dgc'}")
    .Attr("wire: {'float32', 'float16', 'bfloat16'} = 'float32'")
    .Attr("steps: int >= 0 = 30")
    .Attr("index_type: {int32, int64} = DT_INT32")
    .SetShapeFn([](InferenceContext* c) { return selection_shapes(c, 2, 1); })
    .Doc(R"doc(
Selects from residual + gradient in one pass over memory; unsent values are the new residual.

Values are rounded to the wire's type, and the rounding error stays in the residual:
scatter(values) + new_residual = residual + gradient.

residual: [n].
gradient: [n].
k: Scalar, 0 <= k <= n.
seed: As in TopK.
values: [k].
indices: [k], ascending.
new_residual: [n].
)doc");

REGISTER_OP("TfposeidonMomentumCorrectionTopK")
    .Input("residual: float")
    .Input("gradient: float")
    .Input("velocity: float")
    .Input("k: int64")
    .Input("seed: int64")
    .Output("values: float")
    .Output("indices: index_type")
    .Output("new_residual: float")
    .Output("new_velocity: float")
    .Attr("momentum: float")
    .Attr("method: {'mstopk', 'exact', 'dgc'}")
    .Attr("wire: {'float32', 'float16', 'bfloat16'} = 'float32'")
    .Attr("steps: int >= 0 = 30")
    .Attr("index_type: {int32, int64} = DT_INT32")
    .SetShapeFn([](InferenceContext* c) { return selection_shapes(c, 3, 2); })
    .Doc(R"doc(
Selects like ErrorFeedbackTopK, with momentum correction and factor masking (Lin et al. 2018,
section 3).

Selects from residual + (momentum * velocity + gradient); the velocity of sent elements becomes 0.

residual: [n].
gradient: [n].
velocity: [n].
k: Scalar, 0 <= k <= n.
seed: As in TopK.
values: [k].
indices: [k], ascending.
new_residual: [n].
new_velocity: [n].
)doc");

}  // namespace
}  // namespace tfposeidon
