"""Files of runs as people write them: byte order marks, spaces, floats, empty and surplus cells, missing columns."""

import pytest

from llmb.errors import ConfigError
from llmb.perfmodel.serving_time.serving_rows import read_serving_rows
from llmb.perfmodel.step_time.published_rows import read_rows

HEADER = "model,gpu,dtype,gpus,seqlen,gbs,mbs,tp"
ROW = "llama3.1-8b,h100,bf16,8,4096,8,1,1"


def rows(tmp_path, text, read=read_rows):
    path = tmp_path / "runs.csv"
    path.write_bytes(text.encode())
    return read(path)


@pytest.mark.parametrize(
    "text",
    [
        f"{HEADER}\n{ROW}\n",
        f"\ufeff{HEADER}\r\n{ROW}\r\n",
        f"{HEADER.replace(',', ' , ')}\n{ROW.replace(',', ' , ')}\n",
        f"{HEADER}\n{ROW.replace('8,4096,8,1', '8.0,4096.00,8.0,1.0')}\n",
        f"{HEADER},pp,note\n{ROW},,a remark\n",
        f"{HEADER}\n{ROW},,\n",  # empty cells beyond the columns
        f"Model,GPU type,Precision,Num GPUs,Seq length,Global batch size,Micro-batch size,TP\n{ROW}\n",
    ],
    ids=["plain", "byte order mark", "spaces", "floats", "empty cells", "trailing commas", "other spellings"],
)
def test_a_row_is_the_same_however_it_is_written(tmp_path, text):
    plain = rows(tmp_path, f"{HEADER}\n{ROW}\n")[0]
    assert rows(tmp_path, text)[0].setup == plain.setup is not None


def test_columns_of_a_load_have_the_words_of_predict_too(tmp_path):
    row = "llama3.1-8b,vllm,h200,fp8,1024,128,8,2\n"
    published = rows(tmp_path, "model,backend,system,precision,isl,osl,concurrency,tp\n" + row, read_serving_rows)
    others = rows(tmp_path, "model,engine,gpu,dtype,isl,osl,concurrency,tp\n" + row, read_serving_rows)
    assert others[0].setup == published[0].setup is not None


def test_a_column_has_one_meaning_where_both_spellings_stand_in_a_file(tmp_path):
    """The second is a column that is not used, as those that nobody knows."""
    (row,) = rows(tmp_path, f"{HEADER},gpu_type\n{ROW},b200\n")
    assert row.setup.gpu == "h100"
    assert row.cells["gpu_type"] == "b200"


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (ROW.replace("h100,bf16,8", "h100,bf16,\u00b2"), "gpus must be a whole number, 1 or more, got '\u00b2'"),
        (ROW.replace("h100,bf16,8", "h100,bf16," + "9" * 5000), "gpus must be a whole number"),
        (ROW.replace("h100,bf16,8", "h100,bf16,0"), "gpus must be a whole number, 1 or more, got '0'"),
        (ROW.replace("h100,bf16,8", "h100,bf16,8.5"), "gpus must be a whole number, 1 or more, got '8.5'"),
        (f"{ROW},4,5", "2 cells more than columns"),
        (",,,,,,,", "no model"),
    ],
)
def test_a_row_that_cannot_be_read_says_why(tmp_path, cells, reason):
    bad, good = rows(tmp_path, f"{HEADER}\n{cells}\n{ROW}\n")
    assert bad.setup is None
    assert bad.reason.startswith(reason)
    assert good.setup is not None


def test_rows_have_the_number_of_their_line(tmp_path):
    assert [row.number for row in rows(tmp_path, f"{HEADER}\n\n{ROW}\n\n\n{ROW}\n")] == [3, 6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEADER};".replace(",", ";") + f"\n{ROW}\n", "has no column model; its first line names columns such as"),
        ("a,b\n1,2\n", "has no column model"),
        (f"{HEADER.replace('gpus,', '')}\n{ROW}\n", "has no column gpus"),
        (f"{HEADER},tp\n{ROW},1\n", "column tp occurs 2 times"),
        (f"{HEADER}\n", "has no rows; it needs a line of columns such as"),
        ("", "has no rows"),
    ],
)
def test_a_file_without_usable_columns_is_refused_as_a_whole(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        rows(tmp_path, text)


def test_a_file_of_loads_is_read_alike(tmp_path):
    text = "\ufeffmodel,backend,system,precision,isl,osl,concurrency\r\nllama3.1-8b,VLLM,h200_sxm,fp8,512.0,64,4\r\n"
    (row,) = rows(tmp_path, text, read_serving_rows)
    assert (row.setup.engine, row.setup.gpu, row.setup.isl) == ("vllm", "h200", 512)
    (row,) = rows(tmp_path, text.replace("VLLM", "tgi"), read_serving_rows)
    assert row.reason == "engine tgi is not modelled; engines are: vllm, sglang, trtllm, native"
    with pytest.raises(ConfigError, match="has no column backend"):
        rows(tmp_path, f"{HEADER}\n{ROW}\n", read_serving_rows)
