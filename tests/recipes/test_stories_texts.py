"""The stories recipe's texts: which files, their checksums, how they fall into stories."""

import gzip
import hashlib
from dataclasses import replace

import pytest

from mlx_zip.errors import DataError
from recipes.stories.texts import SOURCES, read_stories, require_files, split_sampled, split_tinystories
from support.stories_toy import corpus


@pytest.fixture
def folder(tmp_path):
    return corpus(tmp_path / "data")


def test_a_sampled_file_falls_into_stories_at_its_separator_lines():
    text = "A dog.\nIt ran. \n<|endofstory|>\nA cat <|endofstory|> sat.\n<|endofstory|>\n\n<|endofstory|>\n"
    assert split_sampled(text) == ["A dog.\nIt ran. ", "A cat <|endofstory|> sat."]


def test_in_a_real_file_one_newline_parts_stories_and_two_part_paragraphs():
    assert split_tinystories("One.\n\nMore of it.\nTwo.\n\nMore.\n") == ["One.\n\nMore of it.", "Two.\n\nMore."]


def test_every_source_is_read(folder):
    stories = read_stories(folder, check=False)
    assert {name: len(found) for name, found in stories.items()} == {
        "t1.train": 30,
        "t1.test": 6,
        "mixed.train": 30,
        "real.train": 30,
        "real.test": 6,
    }


def test_another_file_than_the_recorded_one_is_refused_by_name(folder):
    with pytest.raises(DataError, match=r"synth_t1\.train\.txt\.gz is not the file of the recipe: sha256"):
        read_stories(folder)


def test_the_recorded_file_is_taken(folder):
    path = folder / SOURCES["t1.test"].name
    source = replace(SOURCES["t1.test"], sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(source.stories(folder)) == 6


def test_a_missing_file_is_named_with_what_it_is_and_its_checksum(folder):
    source = SOURCES["mixed.train"]
    (folder / source.name).unlink()
    with pytest.raises(DataError) as error:
        require_files(folder)
    assert f"lacks {source.name} (" in str(error.value)
    assert source.origin in str(error.value)
    assert source.sha256 in str(error.value)


def test_a_missing_folder_lacks_every_file(tmp_path):
    with pytest.raises(DataError, match=r"nowhere lacks synth_t1\.train\.txt\.gz, .*tinystories\.test\.txt\.gz"):
        read_stories(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "stored", [b"no gzip", gzip.compress(b"\xff\xfe", mtime=0), gzip.compress(b"a" * 999, mtime=0)[:-9]]
)
def test_a_damaged_file_is_named(folder, stored):
    (folder / SOURCES["t1.test"].name).write_bytes(stored)
    with pytest.raises(DataError, match=r"synth_t1\.test\.txt\.gz cannot be read"):
        read_stories(folder, check=False)


def test_a_file_without_stories_is_named(folder):
    (folder / SOURCES["real.test"].name).write_bytes(gzip.compress(b"\n \n\n", mtime=0))
    with pytest.raises(DataError, match=r"tinystories\.test\.txt\.gz holds no story"):
        read_stories(folder, check=False)
