from jagcodec.batch.packed import MicroBatches as MicroBatches
from jagcodec.batch.packed import PackPlan as PackPlan
from jagcodec.batch.rectangles import Layout as Layout
from jagcodec.batch.rectangles import PaddingSide as PaddingSide
from jagcodec.columns.fields import FieldSchema as FieldSchema
from jagcodec.ragged.column_arrays import ColumnArrays as ColumnArrays
from jagcodec.ragged.varlen import PackedColumn as PackedColumn
