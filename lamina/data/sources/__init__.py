"""Sources of documents: files, folders and Hub datasets."""

ALLOWED = (
    "'embedded', a UTF-8 text file or a .jsonl file with a text field (plain, .gz, .xz or .zst), a .parquet file, "
    "a folder of such files, or hf:NAME[:CONFIG][@SPLIT]"
)
