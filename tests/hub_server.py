"""A small Hub on loopback, for the real huggingface_hub client (HF_HUB_DISABLE_XET=1): repos with commits on `main`.

with serve() as hub:
    ...                      # a process with HF_ENDPOINT=hub.endpoint and HF_TOKEN=TOKEN pushes and loads
    hub.repos["me/model"].commits[-1].files["config.json"]
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import yaml

USER, TOKEN = "me", "hf_good"
LFS = (".safetensors", ".bin", ".pt")


class Refusal(Exception):
    """An answer other than 200: status, X-Error-Code (what the client turns into an exception), X-Error-Message."""

    def __init__(self, status, message, code=None):
        super().__init__(message)
        self.status, self.headers = status, {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


@dataclass
class Commit:
    """parent: sha of the commit before, as the client named it; empty where it named none."""

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
    private: bool = False
    commits: list[Commit] = field(default_factory=lambda: [Commit("initial commit", {".gitattributes": b"*.bin filter=lfs\n"})])

    def at(self, revision):
        """The commit that `main` or a sha names."""
        if not (named := [commit for commit in self.commits if revision in ("main", commit.sha)]):
            raise Refusal(404, f"no revision {revision}", "RevisionNotFound")
        return named[-1]


def oid(path, content):
    """What the client compares its own file with: sha256 of LFS content, git's sha1 of anything else."""
    kind, prefix = (hashlib.sha256, b"") if path.endswith(LFS) else (hashlib.sha1, b"blob %d\0" % len(content))
    return kind(prefix + content).hexdigest()


class Hub(ThreadingHTTPServer):
    """repos: by id. blobs: uploaded LFS content by sha256. log: "METHOD path" of every request, in order."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos, self.blobs, self.log = {}, {}, []
        self.lock = threading.Lock()
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        # LFS content is on another host: the client follows redirects on the same one, and would lose X-Repo-Commit.
        self.cdn = f"http://localhost:{self.server_port}/cdn"


@contextlib.contextmanager
def serve():
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            hub.shutdown()


class Handler(BaseHTTPRequestHandler):
    """Answers what ROUTES has, anything else with 501."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle_any(self):
        self.path = self.path.partition("?")[0]
        self.server.log.append(f"{self.command} {self.path}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            for method, pattern, answer in ROUTES:
                if self.command in method.split() and (match := re.fullmatch(pattern, self.path)):
                    with self.server.lock:
                        return answer(self, *map(unquote, match.groups()))
            raise Refusal(501, f"{self.command} {self.path} is not spoken here")
        except Refusal as refusal:
            self.reply({"error": str(refusal)}, refusal.status, refusal.headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def reply(self, content, status=200, headers=None):
        """bytes as they are, anything else as JSON; no body to a HEAD."""
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

    def repo(self, repo_id, write=False):
        user, repo = self.user(required=write), self.server.repos.get(repo_id)
        if repo is None or (repo.private and not user):
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
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
        front = re.match(r"---\n(.*?)\n---\n", json.loads(self.body)["content"], re.DOTALL)
        try:
            yaml.safe_load(front[1] if front else "")
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
        self.repo(repo_id, write=True)
        objects, verify = json.loads(self.body)["objects"], f"{self.server.endpoint}/{repo_id}.git/info/lfs/verify"
        for item in objects:
            if item["oid"] not in self.server.blobs:
                item["actions"] = {"upload": {"href": f"{self.server.cdn}/{item['oid']}"}, "verify": {"href": verify}}
        self.reply({"transfer": "basic", "objects": objects})

    def lfs_put(self, sha256):
        if hashlib.sha256(self.body).hexdigest() != sha256:
            raise Refusal(400, "the content has another sha256")
        self.server.blobs[sha256] = self.body
        self.reply({})

    def lfs_verify(self, repo_id):
        self.repo(repo_id, write=True)
        self.uploaded(json.loads(self.body))
        self.reply({})

    def uploaded(self, item):
        content = self.server.blobs.get(item["oid"])
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
                files[value["path"]] = self.uploaded(value)
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise Refusal(501, f"{key} is not spoken here")
        repo.commits.append(Commit(header["value"]["summary"], files, parent))
        sha = repo.commits[-1].sha
        self.reply({"success": True, "commitOid": sha, "commitUrl": f"{self.server.endpoint}/{repo_id}/commit/{sha}"})

    def info(self, repo_id, revision="main"):
        repo = self.repo(repo_id)
        commit = repo.at(revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        self.reply({"id": repo_id, "sha": commit.sha, "private": repo.private, "siblings": siblings})

    def tree(self, repo_id, revision, folder=""):
        files = self.repo(repo_id).at(revision).files
        inside = {path: content for path, content in files.items() if path.startswith(folder and f"{folder}/")}
        if not inside:
            raise Refusal(404, f"no folder {folder}", "EntryNotFound")
        self.reply([{"type": "file", "path": path, "size": len(data), "oid": oid(path, data)} for path, data in inside.items()])

    def resolve(self, repo_id, revision, path):
        commit = self.repo(repo_id).at(revision)
        headers = {"X-Repo-Commit": commit.sha}
        if (content := commit.files.get(path)) is None:
            raise Refusal(404, f"no file {path}", "EntryNotFound")
        etag = oid(path, content)
        if not path.endswith(LFS):
            return self.reply(content, headers=headers | {"ETag": f'"{etag}"'})
        headers |= {"Location": f"{self.server.cdn}/{etag}", "X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        self.reply(b"", 302, headers)

    def cdn(self, sha256):
        self.reply(self.server.blobs[sha256], headers={"ETag": f'"{sha256}"'})


REPO = r"([\w.-]+(?:/[\w.-]+)?)"
ROUTES = (
    ("GET", "/api/whoami-v2", lambda self: self.reply({"type": "user", "name": self.user(), "orgs": []})),
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate_yaml),
    ("POST", f"/api/models/{REPO}/preupload/([^/]+)", Handler.preupload),
    ("POST", f"/{REPO}.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", "/cdn/([0-9a-f]{64})", Handler.lfs_put),
    ("POST", f"/{REPO}.git/info/lfs/verify", Handler.lfs_verify),
    ("POST", f"/api/models/{REPO}/commit/([^/]+)", Handler.commit),
    ("GET", f"/api/models/{REPO}", Handler.info),
    ("GET", f"/api/models/{REPO}/revision/([^/]+)", Handler.info),
    ("GET", f"/api/models/{REPO}/tree/([^/]+)/?(.*)", Handler.tree),
    ("GET HEAD", f"/{REPO}/resolve/([^/]+)/(.+)", Handler.resolve),
    ("GET HEAD", "/cdn/([0-9a-f]{64})", Handler.cdn),
)
