#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs in a container of the hosts' distribution, twice. `fetch.sh keys` downloads the vendors' keys and uses none of them.
# After the controller has compared them, `fetch.sh packages` puts each repository with its signed index, untouched, into
# /stage/apt, and of its packages those that are wanted with everything they depend on, down to libc. What a vendor signed
# stays signed by it. Nothing of a vendor is installed or run here.
#
# Arguments: keys or packages; uid:gid that the files belong to afterwards.
# /in/repositories: name|url|suites|components|address of the key|its packages, one repository per line
# /in/components: components of the distribution's archive that are read, beside those that its image reads
# /in/pins: packages that hold apt's preferences; /in/packages: arguments of apt-get install
# /in/NAME.asc: a compared key, for `packages`
#
# The words are components of an archive; the text is a program of awk, or a format of apt-get.
# shellcheck disable=SC2013,SC2016
set -eu
export DEBIAN_FRONTEND=noninteractive
in=/in
apt_get() { apt-get -qq -y --no-install-recommends "$@"; }

# Images of distributions keep indexes compressed anew, which no signature covers.
printf 'Acquire::GzipIndexes "false";\nAcquire::Languages "none";\nAPT::Update::Error-Mode "any";\nAPT::Sandbox::User "root";\n' >/etc/apt/apt.conf.d/zz-staging
rm -f /etc/apt/apt.conf.d/docker-clean /etc/apt/apt.conf.d/docker-gzip-indexes
rm -rf /var/lib/apt/lists/*

# A bare image cannot speak HTTPS.
if [ ! -e /etc/ssl/certs/ca-certificates.crt ]; then
    apt_get update
    apt_get install ca-certificates >/dev/null
fi
for component in $(cat "$in/components"); do
    # In one line or in deb822's, wherever `main` stands and this one does not.
    has_main='^(deb|Components:) (.* )?main( |$)'
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list.d/ubuntu.sources; do
        [ ! -e "$file" ] || sed -Ei "/$has_main/{/ $component( |\$)/!s/\$/ $component/}" "$file"
    done
done
if [ "$1" = keys ]; then
    while IFS='|' read -r name _ _ _ key _; do
        [ -z "$key" ] || /usr/lib/apt/apt-helper download-file "$key" "/stage/keys/$name.asc" >/dev/null
    done <"$in/repositories"
    chown -R "$2" /stage/keys
    exit
fi

work=/stage/apt/.work
mkdir -p "$work/archives/partial" /etc/apt/keyrings
while IFS='|' read -r name url suites components _ _; do
    cp "$in/$name.asc" /etc/apt/keyrings/
    printf 'Types: deb\nURIs: %s\nSuites: %s\n%sArchitectures: amd64\nSigned-By: /etc/apt/keyrings/%s.asc\n' \
        "$url" "$suites" "${components:+Components: $components
}" "$name" >"/etc/apt/sources.list.d/$name.sources"
done <"$in/repositories"
apt_get update

# Each vendor's repository supplies its own packages only, as on the hosts (role apt_repository). Its host tells
# it from the others, or what its index says of itself where the host has others too.
apt-get indextargets --format '$(REPO_URI)|$(SITE)|$(ORIGIN)|$(LABEL)' 'Created-By: Packages' | sort -u >/tmp/sites
# shellcheck disable=SC2094 # both only read it
while IFS='|' read -r name url _ _ _ supplies; do
    pin=$(awk -F '|' -v uri="${url%/}/" '
        NR == FNR { sub("/*$", "/", $2); vendors[$2] = 1; next }
        { sub("/*$", "/", $1) }
        $1 == uri { site = $2; origin = $3; label = $4 }
        !($1 in vendors) { others[$2] = 1 }
        END {
            sub("^[a-z+]*://", "", site); sub("/.*", "", site); sub(":[0-9]*$", "", site)
            for (other in others) {
                sub("^[a-z+]*://", "", other); sub("/.*", "", other); sub(":[0-9]*$", "", other)
                if (other == site) shared = 1
            }
            if (site != "" && !shared) print "origin \"" site "\""
            else if (origin ~ /^[A-Za-z0-9]/ && label ~ /^[A-Za-z0-9]/ && (origin label) !~ /,/) print "release o=" origin ",l=" label
        }' "$in/repositories" /tmp/sites)
    if [ -z "$pin" ]; then
        echo "$name ($url) could replace every package: serve it from a host of its own" >&2
        exit 1
    fi
    printf 'Package: %s\nPin: %s\nPin-Priority: 500\n\nPackage: *\nPin: %s\nPin-Priority: 1\n' \
        "$supplies" "$pin" "$pin" >"/etc/apt/preferences.d/$name.pref"
done <"$in/repositories"

# Of packages with preferences only these are read; their scripts do not run.
mkdir /tmp/pins && cd /tmp/pins
[ ! -s "$in/pins" ] || xargs apt-get -qq download <"$in/pins" >/dev/null
for file in *.deb; do
    [ -e "$file" ] || continue
    dpkg-deb --extract "$file" /tmp/pins/files
done
for file in /tmp/pins/files/etc/apt/preferences.d/*; do
    [ ! -f "$file" ] || [ -L "$file" ] || cp "$file" /etc/apt/preferences.d/
done
cd /

# Every repository has a directory: a vendor's its name, the distribution's own `distribution`, `distribution-2`, ...
apt-get indextargets --format '$(REPO_URI) $(BASE_URI) $(METAKEY) $(FILENAME)' 'Created-By: Packages' >/tmp/targets
: >/tmp/directories
number=0
cut -d ' ' -f 1 /tmp/targets | sort -u | while read -r uri; do
    name=$(awk -F '|' -v uri="$uri" '{ sub("/*$", "/", $2); if ($2 == uri) print $1 }' "$in/repositories")
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
    --print-uris install <"$in/packages" >/tmp/uris
while read -r uri file _; do
    uri=${uri#\'} uri=${uri%\'}
    repository=$(awk -v uri="$uri" 'index(uri, $1) == 1 { print $1 }' /tmp/directories)
    path=/stage/apt/$(directory_of "$repository")/$(printf '%s' "${uri#"$repository"}" | sed 's/%2b/+/g; s/%7e/~/g; s/%3a/:/g; s|^\./||')
    echo "$file $path" >>/tmp/places
    # What an earlier run brought is not brought again.
    [ ! -e "$path" ] || ln -f "$path" "$work/archives/$file"
done </tmp/uris
xargs apt-get -qq -y --no-install-recommends -o Dir::State::status=/tmp/status -o "Dir::Cache::archives=$work/archives" \
    --download-only install <"$in/packages" >/dev/null
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
chmod -R a+rX /stage/apt
chown -R "$2" /stage/apt
