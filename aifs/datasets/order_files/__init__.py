"""The order of an epoch as a file: what a rank reads, in the format of the dataset, one block after
the other, for programs that know nothing of AIFS (docs/guide/datasets.md, Virtual files).

Pure: a dataset's index and an order are turned into pieces of its files. One module per format,
each with

    joined(blocks: ChosenBlocks, sources: OrderSources) -> Joined

which reads headers and footers of the files and no rows, and raises DatasetError for files that
cannot be one.
"""
