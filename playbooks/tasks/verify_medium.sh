#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Verifies directories of an air gap's medium, those that are there: SHA256SUMS has the expected hash, and every file is
# listed there and has its hash; none was added or removed. Otherwise prints one sentence that begins with the file.
#
# Arguments: the medium, the hash of SHA256SUMS, a file that remembers what was verified, or '', and the directories.
# A file with the inode, size and times of then is not read again; nobody can set the time of the last change (%C).
set -eu
export LC_ALL=C
medium=$1 expected=$2 record=$3
shift 3

refuse() {
    printf '%s' "$medium/$1" | tr -c ' -~' '?'
    exit 3
}

[ -d "$medium" ] || exit 0
cd "$medium"
for directory in "$@"; do
    shift
    if [ -e "$directory" ] || [ -L "$directory" ]; then set -- "$@" "$directory"; fi
done
# The mount point of a medium that was taken away is an empty directory, and an installed host does not need the medium.
[ $# -gt 0 ] || [ -e SHA256SUMS ] || exit 0
[ -f SHA256SUMS ] || refuse "SHA256SUMS is missing or no regular file: copy the medium again."
sums=$(head -c 16777216 SHA256SUMS) || refuse "SHA256SUMS cannot be read."
[ "$(printf '%s\n' "$sums" | sha256sum)" = "$expected  -" ] ||
    refuse "SHA256SUMS was changed since it was staged, or belongs to another medium than air-gap.yml: copy the medium again."
[ $# -gt 0 ] || exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
find "$@" \( -name '*[! -~]*' -printf 'x\t./%p\n' \) -o -printf '%y %D %i %s %T@ %C@\t./%p\n' >"$work/there" ||
    refuse ' cannot be read.'
# Lines of SHA256SUMS are 64 digits, two spaces and a path. What is to be verified is printed as such lines, behind
# what identifies the content of the file.
printf '%s\n' "$sums" | awk -v wanted="$work/wanted" '
    function refuse(path, why) { print substr(path, 3) " " why; refused = 1; exit }
    NR == FNR { hash[substr($0, 67)] = substr($0, 1, 64); next }
    { path = substr($0, index($0, "\t") + 1); there[path] = substr($0, 1, 1) }
    there[path] == "d" { next }
    there[path] != "f" { refuse(path, "is a link, a special file or has an unusual name, as nothing that was staged: copy the medium again.") }
    !(path in hash) { refuse(path, "is not in SHA256SUMS: it was added after staging. Remove it, or copy the medium again.") }
    { print substr($0, 1, index($0, "\t")) hash[path] "  " path >wanted }
    END {
        for (path in hash) {
            above = path
            while (!refused && !(path in there) && sub("/[^/]*$", "", above))
                if (above in there) refuse(path, "is missing, and SHA256SUMS lists it: copy the medium again.")
        }
    }' - "$work/there" >"$work/problem"
[ ! -s "$work/problem" ] || refuse "$(cat "$work/problem")"

touch "$work/wanted" "$work/known"
[ ! -f "$record" ] || cp "$record" "$work/known"
grep -vxFf "$work/known" "$work/wanted" >"$work/unread" || exit 0
cut -f 2- "$work/unread" | sha256sum --check --strict --quiet >"$work/failed" 2>"$work/errors" ||
    refuse "$(sed -n '1s|^\./\(.*\): FAILED.*|\1|p' "$work/failed") was changed since it was staged, or cannot be read ($(
        head -n 1 "$work/errors"
    )): copy it again from where it was staged."
if [ -n "$record" ] && [ -d "${record%/*}" ]; then
    sort -u "$work/known" "$work/wanted" >"$record.part"
    mv "$record.part" "$record"
fi
