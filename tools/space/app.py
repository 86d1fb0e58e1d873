"""The page of `hf-posenc explore` as a Space on the Hub. To serve it locally, run: python tools/space/app.py"""

from hf_posenc import explorer

if __name__ == "__main__":
    explorer.serve(max_parameters=200_000_000, max_memory=4, max_seconds=120, hub_only=True)
