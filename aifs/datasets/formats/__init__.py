"""How files of each format are divided into blocks. One module per format; each has

NAME        what users call it: "parquet", "arrow", "jsonl", "text", "tar", "megatron", ...
SUFFIXES    of file names that have this format
blocks      (FileBytes) -> Iterator[RowBlock]; a file that is no such file, torn or empty of sense
            raises DatasetError with what is wrong and where
"""
