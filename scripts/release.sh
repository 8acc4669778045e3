#!/usr/bin/env bash
# Make a release: check the version, test, build both archives, tag. Pushes and uploads nothing.
#   scripts/release.sh VERSION            e.g. 0.1.0
#   scripts/release.sh VERSION --dry-run  check and build, without the tests and the tag
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?usage: scripts/release.sh VERSION [--dry-run]} is_dry=${2:-}
python=${PYTHON:-.venv/bin/python}

stop() {
    echo "release: $1" >&2
    exit 1
}

[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || stop "$version is not a version of the form 1.2.3"
[[ -z $is_dry || $is_dry == --dry-run ]] || stop "unknown option $is_dry"
grep -qx "__version__ = \"$version\"" prober/__init__.py || stop "prober/__init__.py does not say $version"
grep -qE "^## $version \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" CHANGELOG.md || stop "CHANGELOG.md has no dated section $version"
[[ -z $(git status --porcelain) ]] || stop "there are uncommitted changes"
if git rev-parse -q --verify "refs/tags/v$version" >/dev/null; then stop "v$version already exists"; fi

[[ -n $is_dry ]] || make test
# Build from the commit, so that no other file in this folder gets in.
rm -rf dist
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
git archive HEAD | tar -x -C "$source"
"$python" -m build --no-isolation --outdir dist "$source" >/dev/null
(cd dist && sha256sum -- * >SHA256SUMS)
cat dist/SHA256SUMS
if [[ -z $is_dry ]]; then
    git tag --annotate "v$version" --message "prober $version"
    echo "Tagged v$version. To publish: git push origin v$version, and upload the files in dist/."
fi
