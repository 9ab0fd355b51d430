"""The prose of docs/compression.md; figures are not here but in the records."""

HEAD = """\
# Compression

How much text an id stands for, with hypertokens and without, what compressing costs, and the paper's estimate of
training FLOPs: tables 2, 7 and 9, figure 4 and appendix B of the zip2zip paper (arXiv 2506.01084) beside ours.

This page is written by `mlx_zip bench tokens --write-docs docs/compression.md` from `tokens.jsonl`, `flops.jsonl` and
`codec-figure4.jsonl` in `bench/records/`; how to measure anew is at its end."""

TABLE_2 = """\
## Table 2: bytes per token

A token is an id that a model reads or emits; bytes are those of the UTF-8 text. "Base" has base ids alone. The columns
behind it have hypertokens, with the gain over base in brackets, by how much text shares a codebook: a window of so many
base ids that runs across documents, or one document. Entries have up to 3 base ids (the paper's M) and a codebook has
2,048 slots; a full codebook is used and no longer added to. No id is kept from merging."""

TABLE_7 = """\
Ids over base ids by merge size M, windows of 2,048 base ids, 2,048 slots: the last column of the paper's table 7, whose
text is the paper's training text and whose base ids are Phi-3.5's, which are Llama 2's. "Mixture" weighs the texts as
table 12 weighs domains (code 25, math 20, chat 20, web 20, multilingual 15 %), texts of a domain alike; lower is
better."""

TABLE_9 = """\
Appendix B puts the hyper-encoder's share at α = l · M / L (l layers of it, L of the model), and training with
hypertokens at ρ(1 + α) of training without, ρ being table 7's rate. Its α has one encoder row per id. "Rows per id" is
how many are encoded, input and output rows together; "α by rows" is l · M / L times that. An encoder layer counts as a
layer of the model in both. The Phi rows are the paper's own experiments, which its table leaves out (L from the
models' configurations). This is arithmetic; no training is measured here."""

FIGURE_4 = """\
Time to tokenize a text of so many bytes, alone and with its ids then compressed (merge size 3, 2,048 slots, one
codebook for the whole text): medians, with least and greatest of the trials in brackets; what a codec adds is the
median of what it adds in each trial. The library `tokenizers` is Hugging Face's; the picture shows its tokenizer. Both
codecs are given the list of ids that a tokenizer gives, and most of our time is making an array of it
([on arrays](../bench/records/codec-linux-x86_64.jsonl)). The machine had other work, see its load: the codecs compare
with one another, times with those of other machines do not. The paper prints its figure 4 without numbers; it says that
its compressor in Rust, which is zip2zip-compression, beats one in Python and matches the latency of Hugging Face's
BPE."""

WHY = """\
- **Text.** The paper's domains are samples of the Stack, NuminaMath, UltraChat, FineWeb-2 and FineWeb-Edu; ours are
  other texts of the same kinds. Where the column "base" is not the paper's, the text is another sort of text: short
  programs with their tests, a library and its headers gain by different amounts. That three texts of code together
  come near the paper's gain owes as much to their choice as to the window: in windows of 2,048, 3 MB of a system's C
  headers gained 86 % with Llama-3's base ids, and 3 MB of the Python library 40 % (not in the records). WikiText
  comes in split words with marks of its own (`@-@`, `<unk>`), which recur and so gain more than web pages do; our
  multilingual texts are paragraphs and sentences that have little to do with one another, and gain less than whole
  pages.
- **Window.** The paper does not say for table 2 how much text shares a codebook, nor how large it is. Gains grow with
  the window until the codebook is full, and fall again when the text moves on and a full codebook stays: compare
  windows of 4,096 and 8,192.
- **Documents.** Windows run across documents, so short documents share one codebook; column "documents" gives each its
  own, which is what a single request sees, and is much less where documents are short.
- **Rounding.** All of the paper's percentages are quotients of its printed numbers, which have one decimal.
- **Vocabularies.** Phi-4 (14B) has about 100,000 base ids; the paper's 200K are those of Phi-4-mini, which are
  o200k_base's. Qwen composes characters first (NFC), and so do we; bytes are those of the text as it was.
- **α.** The paper rounds 0.125 to 0.13. Its α counts one row per id; a model whose input and output encoders differ
  encodes two for an entry that is read."""

TEXTS = """\
Licences of texts and vocabularies are their owners'; none is part of mlx_zip, and only counts are recorded.
`code/python` and `code/c-headers` are the library and the headers of CPython 3.11, in order of their names."""

RERUN = """\
## To measure anew

```sh
pip install 'mlx_zip[bench]' zip2zip-compression
mlx_zip bench tokens --check --limit-bytes 600000 --codebook-sizes 1024 2048 --tokenizers llama3.tiktoken \\
    --text code/humaneval-x=humanevalx.jsonl math/gsm8k=gsm8k.jsonl:question+answer web/wikitext2=wikitext2.txt \\
    > tokens.jsonl
mlx_zip bench flops > flops.jsonl
mlx_zip bench codec --figure4 docs/compression-figure4.png --text python.jsonl --tokenizer encoder.json \\
    > codec-figure4.jsonl
cp tokens.jsonl flops.jsonl codec-figure4.jsonl bench/records/
mlx_zip bench tokens --write-docs docs/compression.md
```

Vocabularies and texts are files, also with .gz; `mlx_zip bench tokens --help` lists the kinds. What stands before the
slash of a text's name is the paper's domain. `--check` holds the ids of every window against zip2zip-compression's and
ends with an error where one differs. The two texts from CPython are made by

```python
import json, sysconfig
from pathlib import Path

for key, ending, name in (("stdlib", "*.py", "python.jsonl"), ("include", "*.h", "c-headers.jsonl")):
    root = Path(sysconfig.get_path(key))
    with open(name, "w") as out:
        for path in sorted(root.rglob(ending)):
            text = path.read_bytes().decode("utf-8", "ignore")
            if text and not {"test", "tests", "site-packages"} & set(path.relative_to(root).parts):
                out.write(json.dumps({"text": text}) + "\\n")
```"""
