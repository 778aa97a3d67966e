"""Random access to encoded images in image folders, shards, TFRecords, tables, tar files and generated data.

`open.detect` recognizes a folder's format and returns a Source, which can be counted or opened. Each format is one
module and one entry of `open.FORMATS`.
"""
