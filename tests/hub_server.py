"""A small Hub on the loopback interface for the real huggingface_hub client (HF_HUB_DISABLE_XET=1).

`python tests/hub_server.py --port 8000` serves until it is interrupted. In tests:

with serve() as hub:
    ...                      # a process with HF_ENDPOINT=hub.endpoint and HF_TOKEN=TOKEN pushes and loads models
    hub.repos["me/model"].commits[-1].files["config.json"]
    hub.faults.append(Fault("POST .*/me/model/commit/", refuse(503), times=2))
"""

import argparse
import base64
import contextlib
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote

import yaml

USER, TOKEN = "me", "hf_good"
LFS = (".safetensors", ".bin", ".pt", ".png")


class Refusal(Exception):
    """A response other than 200: status, X-Error-Code (which the client converts to an exception), and X-Error-Message."""

    def __init__(self, status, message, code=None, body=None, **headers):
        super().__init__(message)
        self.status, self.body = status, {"error": message} if body is None else body
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}) | headers


@dataclass
class Commit:
    """A commit. parent: SHA of the parent commit that the client specified, or empty."""

    message: str
    files: dict[str, bytes]
    parent: str = ""

    @property
    def sha(self):
        digest = hashlib.sha1(f"{self.parent} {self.message}".encode())
        for path, content in sorted(self.files.items()):
            digest.update(path.encode() + hashlib.sha256(content).digest())
        return digest.hexdigest()


@dataclass
class Repo:
    """A repository.

    gated: whether only its owner can read its files.
    commits: the commits of main.
    branches: commits of all branches by name. Pull requests are named refs/pr/N.
    """

    private: bool = False
    gated: bool = False
    commits: list[Commit] = field(default_factory=lambda: [Commit("initial commit", {".gitattributes": b"*.bin filter=lfs\n"})])

    def __post_init__(self):
        self.branches = {"main": self.commits}

    def at(self, revision):
        """The commit of a branch, pull request, or SHA."""
        if revision in self.branches:
            return self.branches[revision][-1]
        known = {commit.sha: commit for line in self.branches.values() for commit in line}
        if revision not in known:
            raise Refusal(404, f"no revision {revision}", "RevisionNotFound")
        return known[revision]


@dataclass
class Fault:
    """An action that replaces the responses to matching requests.

    on: regular expression, searched in "METHOD path body".
    act: function of the handler and the answer.
    times: number of requests.
    """

    on: str
    act: Callable
    times: float = 1


def refuse(status, message="not now", code=None, body=None, **headers):
    def act(handler, answer):
        raise Refusal(status, message, code, body, **headers)

    return act


def with_foreign_commit(repo_id):
    """Add someone else's commit of notes.txt before the request is processed."""

    def act(handler, answer):
        repo = handler.server.repos[repo_id]
        repo.commits.append(Commit("by somebody else", {**repo.commits[-1].files, "notes.txt": b"theirs"}))
        answer()

    return act


def git_sha(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def oid(path, content):
    """The hash that the client compares with its file: SHA-256 of LFS content, or git's SHA-1 of other content."""
    return hashlib.sha256(content).hexdigest() if path.endswith(LFS) else git_sha(content)


def described(path, content, sha256="sha256"):
    """A file's size and git ID. LFS content also has its SHA-256, under the key that the route uses."""
    if not path.endswith(LFS):
        return {"size": len(content), "oid": git_sha(content)}
    digest = hashlib.sha256(content).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(content)}\n".encode()
    lfs = {"size": len(content), sha256: digest, "pointerSize": len(pointer)}
    return {"size": len(content), "oid": git_sha(pointer), "lfs": lfs}


class Hub(ThreadingHTTPServer):
    """The server.

    repos: repositories by ID.
    blobs: uploaded LFS content by repository and SHA-256.
    log: "METHOD path" of every request, in order.
    part_size: maximum bytes per upload. Larger LFS content is uploaded in parts of this size.
    port: 0 for a free port.
    """

    def __init__(self, part_size, port):
        super().__init__(("127.0.0.1", port), Handler)
        self.repos, self.blobs, self.log, self.faults, self.part_size = {}, {}, [], [], part_size
        self.lock = threading.Lock()
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        # LFS content has another hostname. The client follows redirects to the same one, and would lose X-Repo-Commit.
        self.cdn = f"http://localhost:{self.server_port}/cdn"

    def handle_error(self, request, client_address):
        """Ignore disconnected clients."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serve(part_size=1 << 20, port=0):
    with Hub(part_size, port) as hub:
        threading.Thread(target=hub.serve_forever, args=[0.02], daemon=True).start()  # polling interval for shutdown
        try:
            yield hub
        finally:
            hub.shutdown()


class Handler(BaseHTTPRequestHandler):
    """Answers the requests in ROUTES, and responds to others with 501."""

    server: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are written separately, which would cost 40 ms per response

    def log_message(self, *_):
        pass

    def handle_any(self):
        self.path, _, query = self.path.partition("?")
        self.query = parse_qs(query)
        self.server.log.append(f"{self.command} {self.path}")
        try:
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = self.answer()
            fault = self.fault(self.body.decode(errors="replace"))
            fault.act(self, answer) if fault else answer()
        except Refusal as refusal:
            self.reply(refusal.body, refusal.status, refusal.headers)
        except ConnectionError:  # the client has disconnected
            self.close_connection = True

    def fault(self, body):
        """The first remaining fault that matches this request."""
        with self.server.lock:
            for fault in self.server.faults:
                if fault.times and re.search(fault.on, f"{self.command} {self.path} {body}"):
                    fault.times -= 1
                    return fault

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def answer(self):
        for method, pattern, answer in ROUTES:
            if self.command in method.split() and (match := re.fullmatch(pattern, self.path)):
                return partial(self.locked, answer, *map(unquote, match.groups()))
        raise Refusal(501, f"{self.command} {self.path} is not spoken here")

    def locked(self, answer, *arguments):
        with self.server.lock:
            answer(self, *arguments)

    def reply(self, content, status=200, headers=None):
        """Send bytes unchanged and other content as JSON. HEAD requests get no body."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def user(self, required=True):
        given = self.headers.get("Authorization")
        if given not in (None, f"Bearer {TOKEN}"):
            raise Refusal(401, "Invalid credentials in Authorization header")
        if required and given is None:
            raise Refusal(401, "Invalid username or password.")
        return given and USER

    def repo(self, repo_id, write=False, files=False):
        user, repo = self.user(required=write), self.server.repos.get(repo_id)
        owner = user is not None and repo_id.startswith(f"{user}/")
        if repo is None or (repo.private and not owner):
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        if write and not owner and not self.query.get("create_pr"):
            raise Refusal(403, f"Forbidden: you may not write to {repo_id}")
        if files and repo.gated and not owner:
            raise Refusal(403 if user else 401, f"Access to model {repo_id} is restricted", "GatedRepo")
        return repo

    def create(self):
        asked, user = json.loads(self.body), self.user()
        repo_id = f"{asked.get('organization') or user}/{asked['name']}"
        if not repo_id.startswith(f"{user}/"):
            raise Refusal(403, f"You don't have the rights to create a model under the namespace of {repo_id}")
        url = f"{self.server.endpoint}/{repo_id}"
        if repo_id in self.server.repos:
            return self.reply({"error": "You already created this model repo", "url": url}, 409)
        self.server.repos[repo_id] = Repo(private=asked.get("visibility") == "private")
        self.reply({"url": url})

    def validate_yaml(self):
        try:
            metadata(json.loads(self.body)["content"])
            self.reply({"errors": [], "warnings": []})
        except yaml.YAMLError as error:
            self.reply({"errors": [{"message": str(error)}], "warnings": []}, 400)

    def preupload(self, repo_id, revision):
        present, files = self.repo(repo_id, write=True).at(revision).files, []
        for path in (file["path"] for file in json.loads(self.body)["files"]):
            mode, known = "lfs" if path.endswith(LFS) else "regular", oid(path, present[path]) if path in present else None
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": known})
        self.reply({"files": files})

    def lfs_batch(self, repo_id):
        self.repo(repo_id)
        self.user()
        objects, here = json.loads(self.body)["objects"], f"{self.server.endpoint}/{repo_id}.git/info/lfs"
        for item in objects:
            if (repo_id, item["oid"]) in self.server.blobs:
                continue
            upload, size = {"href": f"{self.server.cdn}/{repo_id}/{item['oid']}"}, self.server.part_size
            if item["size"] > size:
                parts = {str(n): f"{upload['href']}/{n}" for n in range(1, -(-item["size"] // size) + 1)}
                upload = {"href": f"{here}/complete", "header": {"chunk_size": str(size), **parts}}
            item["actions"] = {"upload": upload, "verify": {"href": f"{here}/verify"}}
        self.reply({"transfer": "basic", "objects": objects})

    def lfs_put(self, repo_id, sha256):
        self.store(repo_id, sha256, self.body)
        self.reply({})

    def lfs_put_part(self, repo_id, sha256, number):
        self.server.blobs[repo_id, sha256, int(number)] = self.body
        self.reply({}, headers={"ETag": f'"{number}"'})

    def lfs_complete(self, repo_id):
        asked = json.loads(self.body)
        parts = [self.server.blobs.pop((repo_id, asked["oid"], part["partNumber"])) for part in asked["parts"]]
        self.store(repo_id, asked["oid"], b"".join(parts))
        self.reply({})

    def store(self, repo_id, sha256, content):
        if hashlib.sha256(content).hexdigest() != sha256:
            raise Refusal(400, "the content has another sha256")
        self.server.blobs[repo_id, sha256] = content

    def lfs_verify(self, repo_id):
        self.user()
        self.uploaded(repo_id, json.loads(self.body))
        self.reply({})

    def uploaded(self, repo_id, item):
        content = self.server.blobs.get((repo_id, item["oid"]))
        if content is None or len(content) != item["size"]:
            raise Refusal(404, f"{item['oid']} was not uploaded with {item['size']} bytes")
        return content

    def commit(self, repo_id, revision):
        repo = self.repo(repo_id, write=True)
        head, (header, *operations) = repo.at(revision), map(json.loads, self.body.splitlines())
        files, parent = dict(head.files), header["value"].get("parentCommit", "")
        if parent not in ("", head.sha):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        for key, value in ((line["key"], line["value"]) for line in operations):
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.uploaded(repo_id, value)
            elif key == "deletedFile" and value["path"] in files:
                del files[value["path"]]
            elif key == "deletedFile":
                raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
            else:
                raise Refusal(501, f"{key} is not spoken here")
        commit = Commit(header["value"]["summary"], files, parent)
        said = {"success": True, "commitOid": commit.sha, "commitUrl": f"{self.server.endpoint}/{repo_id}/commit/{commit.sha}"}
        if self.query.get("create_pr"):
            number = sum(name.startswith("refs/pr/") for name in repo.branches) + 1
            repo.branches[f"refs/pr/{number}"] = [*repo.branches[revision], commit]
            said["pullRequestUrl"] = f"{self.server.endpoint}/{repo_id}/discussions/{number}"
        elif revision in repo.branches:
            repo.branches[revision].append(commit)
        else:
            raise Refusal(400, f"{revision} is no branch")
        self.reply(said)

    def branch(self, repo_id, name):
        repo = self.repo(repo_id, write=True)
        if name in repo.branches:
            raise Refusal(409, f"the branch {name} is there already")
        start = json.loads(self.body).get("startingPoint", "main")
        repo.branches[name] = list(repo.branches.get(start) or [repo.at(start)])
        self.reply({})

    def info(self, repo_id, revision="main"):
        repo = self.repo(repo_id)
        commit = repo.at(revision)
        siblings = []
        for path, content in sorted(commit.files.items()):
            about = described(path, content)
            blob = {"blobId": about.pop("oid"), **about} if self.query.get("blobs") else {}
            siblings.append({"rfilename": path, **blob})
        said = {"id": repo_id, "sha": commit.sha, "private": repo.private, "gated": "manual" if repo.gated else False}
        said["cardData"] = metadata(commit.files.get("README.md", b"").decode())
        self.reply({**said, "siblings": siblings})

    def entries(self, files):
        return [{"type": "file", "path": path, **described(path, content, "oid")} for path, content in sorted(files.items())]

    def tree(self, repo_id, revision, folder=""):
        start = folder and f"{folder}/"
        inside = {
            path: data for path, data in self.repo(repo_id, files=True).at(revision).files.items() if path.startswith(start)
        }
        if not inside:
            raise Refusal(404, f"no folder {folder}", "EntryNotFound")
        if self.query.get("recursive") in (["true"], ["True"], ["1"]):
            return self.reply(self.entries(inside))
        folders = sorted({start + path[len(start) :].partition("/")[0] for path in inside if "/" in path[len(start) :]})
        here = {path: data for path, data in inside.items() if "/" not in path[len(start) :]}
        said = [{"type": "directory", "path": path, "oid": git_sha(path.encode()), "size": 0} for path in folders]
        self.reply(said + self.entries(here))

    def paths_info(self, repo_id, revision):
        files, asked = self.repo(repo_id).at(revision).files, parse_qs(self.body.decode())["paths"]
        self.reply(self.entries({path: files[path] for path in asked if path in files}))

    def resolve(self, repo_id, revision, path):
        commit = self.repo(repo_id, files=True).at(revision)
        headers = {"X-Repo-Commit": commit.sha}
        if (content := commit.files.get(path)) is None:
            raise Refusal(404, f"no file {path}", "EntryNotFound", **headers)
        etag = oid(path, content)
        if not path.endswith(LFS):
            return self.reply(content, headers=headers | {"ETag": f'"{etag}"'})
        self.server.blobs[repo_id, etag] = content
        there = f"{self.server.cdn}/{repo_id}/{etag}"
        headers |= {"Location": there, "X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        self.reply(b"", 302, headers)

    def cdn(self, repo_id, sha256):
        self.reply(self.server.blobs[repo_id, sha256], headers={"ETag": f'"{sha256}"'})


def metadata(card):
    front = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    return yaml.safe_load(front[1] if front else "") or {}


REPO = r"([\w.-]+(?:/[\w.-]+)?)"
ROUTES = (
    ("GET", "/api/whoami-v2", lambda self: self.reply({"type": "user", "name": self.user(), "orgs": []})),
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate_yaml),
    ("POST", f"/api/models/{REPO}/preupload/([^/]+)", Handler.preupload),
    ("POST", f"/{REPO}.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("POST", f"/{REPO}.git/info/lfs/complete", Handler.lfs_complete),
    ("POST", f"/{REPO}.git/info/lfs/verify", Handler.lfs_verify),
    ("PUT", f"/cdn/{REPO}/([0-9a-f]{{64}})", Handler.lfs_put),
    ("PUT", f"/cdn/{REPO}/([0-9a-f]{{64}})/([0-9]+)", Handler.lfs_put_part),
    ("GET HEAD", f"/cdn/{REPO}/([0-9a-f]{{64}})", Handler.cdn),
    ("POST", f"/api/models/{REPO}/commit/([^/]+)", Handler.commit),
    ("POST", f"/api/models/{REPO}/branch/([^/]+)", Handler.branch),
    ("GET", f"/api/models/{REPO}", Handler.info),
    ("GET", f"/api/models/{REPO}/revision/([^/]+)", Handler.info),
    ("GET", f"/api/models/{REPO}/tree/([^/]+)/?(.*)", Handler.tree),
    ("POST", f"/api/models/{REPO}/paths-info/([^/]+)", Handler.paths_info),
    ("GET HEAD", f"/{REPO}/resolve/([^/]+)/(.+)", Handler.resolve),
)


def main():
    """Serve until interrupted. Repositories are kept in memory."""
    parser = argparse.ArgumentParser(description="Serve a local Hub for tests. Its repositories are kept in memory.")
    parser.add_argument("--port", type=int, default=0, help="default: a free port")
    with serve(port=parser.parse_args().port) as hub, contextlib.suppress(KeyboardInterrupt):
        print(f"export HF_ENDPOINT={hub.endpoint} HF_TOKEN={TOKEN} HF_HUB_DISABLE_XET=1", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
