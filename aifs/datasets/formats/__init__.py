"""Formats of datasets, one module each: how files are divided into blocks, which rows a block has,
and how blocks follow one another in an order file. Each has

NAME        for users: "parquet", "arrow", "jsonl", "text", "tar", "megatron", ...
SUFFIXES    of file names that have this format
blocks      (FileBytes, options) -> Iterator[RowBlock]; options: those of ``data.open``
            for this format (records: record_bytes). A file that is no such file, or torn, raises
            DatasetError with the fault and its place (the caller adds the file's name); an empty
            file has no blocks
open_file   (DatasetFile, options) -> OpenBlock. Any thread calls these functions; several at once,
            also for the same file. The memory per file is bounded by its blocks, never by its
            rows. Bytes that are not what the index says raise DatasetError with the file's name
order       (ChosenBlocks, OrderSources) -> Joined: an order file, where the format has them. Reads
            headers and footers of the files and no rows; raises DatasetError for files that cannot
            be one

The format "files" has instead of ``blocks``: catalogue(root, options) -> (bytes, list[RowBlock]),
where each block is a run of these bytes. They are the one "file" of such a dataset (its path is
empty, its version that of the catalogue), and DatasetFile.read gives them.
"""
