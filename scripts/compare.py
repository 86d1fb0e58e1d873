"""Train models with several encodings and compare them by length, as `hf-posenc compare` does."""

from hf_posenc.compare import main
from hf_posenc.evaluation import terminals
from hf_posenc.studies import study

if __name__ == "__main__":
    terminals.set_up()
    study.quiet()
    main()
