"""How files of each format are divided into blocks. One module per format; each has

NAME        what users call it: "parquet", "arrow", "jsonl", "text", "tar", "megatron", ...
SUFFIXES    of file names that have this format
blocks      (FileBytes, options) -> Iterator[RowBlock]; options: what the user gave ``data.open``
            for this format (records: record_bytes). A file that is no such file, or torn, raises
            DatasetError with what is wrong and where (the caller adds the file's name); an empty
            file has no blocks

The format "files" has instead: catalogue(root, options) -> (bytes, list[RowBlock]), where each
block is a run of these bytes. They are the one "file" of such a dataset (its path is empty, its
version that of the catalogue), and what DatasetFile.read gives for it.
"""
