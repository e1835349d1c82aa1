#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs in a container of the hosts' distribution: /stage/apt gets each repository with its signed index, untouched, and of
# its packages those that are wanted with everything they depend on, down to libc. What a vendor signed stays signed by it.
#
# Argument: uid:gid that the files belong to afterwards.
# /stage/.work/repositories: name|url|suites|components|address of the key, one repository per line
# /stage/.work/components: components of the distribution's archive that are read, beside those that its image reads
# /stage/.work/pins, /stage/.work/packages: arguments of apt-get install; pins are packages that hold apt's preferences
set -eu
export DEBIAN_FRONTEND=noninteractive
work=/stage/.work
apt_get() { apt-get -qq -y --no-install-recommends "$@"; }

# Images of distributions keep indexes compressed anew, which no signature covers.
printf 'Acquire::GzipIndexes "false";\nAcquire::Languages "none";\nAPT::Update::Error-Mode "any";\nAPT::Sandbox::User "root";\n' >/etc/apt/apt.conf.d/99staging
rm -f /etc/apt/apt.conf.d/docker-clean
mkdir -p /stage/apt /stage/keys /etc/apt/keyrings "$work/archives/partial"

# A bare image cannot speak HTTPS.
if [ ! -e /etc/ssl/certs/ca-certificates.crt ]; then
    apt_get update
    apt_get install ca-certificates >/dev/null
fi
for component in $(cat "$work/components"); do
    # In one line or in deb822's, wherever `main` stands and this one does not.
    has_main='^(deb|Components:) (.* )?main( |$)'
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list.d/ubuntu.sources; do
        [ ! -e "$file" ] || sed -Ei "/$has_main/{/ $component( |\$)/!s/\$/ $component/}" "$file"
    done
done
while IFS='|' read -r name url suites components key; do
    if [ -n "$key" ]; then
        /usr/lib/apt/apt-helper download-file "$key" "/stage/keys/$name.asc" >/dev/null
    fi
    cp "/stage/keys/$name.asc" "/etc/apt/keyrings/$name.asc"
    printf 'Types: deb\nURIs: %s\nSuites: %s\n%sArchitectures: amd64\nSigned-By: /etc/apt/keyrings/%s.asc\n' \
        "$url" "$suites" "${components:+Components: $components
}" "$name" >"/etc/apt/sources.list.d/$name.sources"
done <"$work/repositories"
apt_get update
if [ -s "$work/pins" ]; then
    xargs apt-get -qq -y --no-install-recommends install <"$work/pins" >/dev/null
fi

# Every repository has a directory: a vendor's its name, the distribution's own `distribution`, `distribution-2`, ...
apt-get indextargets --format '$(REPO_URI) $(BASE_URI) $(METAKEY) $(FILENAME)' 'Created-By: Packages' >/tmp/targets
: >/tmp/directories
number=0
cut -d ' ' -f 1 /tmp/targets | sort -u | while read -r uri; do
    name=$(awk -F '|' -v uri="$uri" '{ sub("/*$", "/", $2); if ($2 == uri) print $1 }' "$work/repositories")
    if [ -z "$name" ]; then
        number=$((number + 1))
        name=distribution$([ "$number" -eq 1 ] || echo "-$number")
    fi
    echo "$uri $name" >>/tmp/directories
done
directory_of() { awk -v uri="$1" '$1 == uri { print $2 }' /tmp/directories; }

# Packages. To a host without any package everything is missing, so nothing depends on what this container holds.
: >/tmp/status
xargs apt-get -qq -y --no-install-recommends -o Dir::State::status=/tmp/status -o Dir::Cache::archives=/tmp/none \
    --print-uris install <"$work/packages" >/tmp/uris
while read -r uri file _; do
    uri=${uri#\'} uri=${uri%\'}
    repository=$(awk -v uri="$uri" 'index(uri, $1) == 1 { print $1 }' /tmp/directories)
    path=/stage/apt/$(directory_of "$repository")/$(printf '%s' "${uri#"$repository"}" | sed 's/%2b/+/g; s/%7e/~/g; s/%3a/:/g; s|^\./||')
    echo "$file $path" >>/tmp/places
    # What an earlier run brought is not brought again.
    [ ! -e "$path" ] || ln -f "$path" "$work/archives/$file"
done </tmp/uris
xargs apt-get -qq -y --no-install-recommends -o Dir::State::status=/tmp/status -o "Dir::Cache::archives=$work/archives" \
    --download-only install <"$work/packages" >/dev/null
while read -r file path; do
    mkdir -p "${path%/*}"
    [ "$work/archives/$file" -ef "$path" ] || mv -f "$work/archives/$file" "$path"
done </tmp/places

# Indexes, with the signed file that names their hashes.
: >"$work/distribution"
while read -r uri base key file; do
    name=$(directory_of "$uri")
    inside=${base#"$uri"}
    target=/stage/apt/$name/$inside
    mkdir -p "$(dirname "$target$key")"
    cp "$file" "$target$key"
    for index in InRelease Release Release.gpg; do
        [ ! -e "${file%"$(printf '%s' "$key" | tr / _)"}$index" ] || cp "${file%"$(printf '%s' "$key" | tr / _)"}$index" "$target$index"
    done
    case $name in distribution*) suite=${inside#dists/} && echo "$name ${suite%/} ${key%%/*}" >>"$work/distribution" ;; esac
done </tmp/targets
python=$(apt-cache policy python3 | sed -n 's/ *Candidate: \([0-9]*\.[0-9]*\).*/\1/p')
echo "$python" >"$work/python"
chmod -R a+rX /stage/apt /stage/keys
chown -R "$1" /stage/apt /stage/keys "$work"
