// Registers the ops that sum received values, with signatures, shapes and documentation.

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfposeidon {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("TfposeidonScatterAdd")
    .Input("values: float")
    .Input("indices: index_type")
    .Input("counts: int64")
    .Input("size: int64")
    .Output("sum: float")
    .Attr("index_type: {int32, int64}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle vector, scalar;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &vector));
      TF_RETURN_IF_ERROR(c->Merge(c->input(0), c->input(1), &vector));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &vector));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 0, &scalar));
      DimensionHandle size;
      TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(3, &size));
      c->set_output(0, c->Vector(size));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sums sparse vectors: sum[indices[i]] += values[i], segment after segment, so that
the bits do not depend on the number of threads.

values: [c].
indices: [c], each in 0 .. size - 1; fastest if each segment is ascending.
counts: [s], the number of pairs in each segment (rank); the sum is c.
size: Scalar.
sum: [size].
)doc");

REGISTER_OP("TfposeidonEncode")
    .Input("x: float")
    .Output("y: T")
    .Attr("T: {half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Rounds to the nearest 16-bit value, ties to even; preserves denormals on every CPU.

x: Any shape.
y: The same shape.
)doc");

REGISTER_OP("TfposeidonSumRows")
    .Input("rows: T")
    .Output("sum: float")
    .Attr("T: {half, bfloat16}")
    .Attr("count: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &rows));
      int64_t count;
      TF_RETURN_IF_ERROR(c->GetAttr("count", &count));
      DimensionHandle size;
      TF_RETURN_IF_ERROR(c->Divide(c->Dim(rows, 0), count, /*evenly_divisible=*/true, &size));
      c->set_output(0, c->Vector(size));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sums `count` concatenated vectors of 16-bit values in float32, in their order.

rows: [count * n].
sum: [n].
)doc");

}  // namespace
}  // namespace tfposeidon
