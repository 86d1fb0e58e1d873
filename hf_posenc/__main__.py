from hf_posenc.cli import app

app(prog_name="hf-posenc")
