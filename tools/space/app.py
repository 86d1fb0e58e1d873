"""The page of `hf-posenc explore` as a Space of the Hub; or here: python tools/space/app.py"""

from hf_posenc import explorer

if __name__ == "__main__":
    explorer.serve(max_parameters=200_000_000, max_memory=4, max_seconds=120, hub_only=True)
