from jagcodec.columns.batch import FieldSchema as FieldSchema
from jagcodec.rows.column_arrays import ColumnArrays as ColumnArrays
from jagcodec.rows.varlen import PackedColumn as PackedColumn
from jagcodec.train.rectangles import Layout as Layout
from jagcodec.train.rectangles import PaddingSide as PaddingSide
