#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Ensures that the gateway has a certificate of a CA that was made on the host, and whose key does not leave it. Prints in
# one line why a certificate is made, an empty one if none is, and then the CA's certificate, which the others need.
#
# Arguments: look or make; the directory of ca.key, ca.pem and the file; its name (it has key and certificate); what the
# certificate is for, as OpenSSL's extendedKeyUsage; the group that may read the file; how many days before its end a
# certificate is made again; for how many days it is valid; and the names and addresses by which others reach the
# gateway. It is no self-signed certificate, as they would need each new one.
set -eu
what=$1 directory=$2 file=$3 usage=$4 group=$5 renew=$6 days=$7
shift 7

name_as() { # DNS:name or IP:address, as a certificate has it
    case "$1" in
    *:*) echo "IP:$1" ;;
    *[!0-9.]*) echo "DNS:$1" | tr '[:upper:]' '[:lower:]' | sed 's/^dns/DNS/' ;;
    *) echo "IP:$1" ;;
    esac
}

ends_soon() { ! openssl x509 -noout -checkend "$((renew * 86400))" -in "$1" >/dev/null 2>&1; }

has_name() { # FILE NAME
    case "$(name_as "$2")" in
    IP:*) openssl x509 -noout -checkip "$2" -in "$1" ;;
    *) openssl x509 -noout -checkhost "$2" -in "$1" ;;
    esac 2>&1 | grep -q 'does match'
}

find_fault() { # what is wrong with the CA ("ca: why") or with the certificate ("why")
    if [ ! -e ca.pem ] || [ ! -e ca.key ]; then
        echo "ca: there is no CA on the host"
    elif ends_soon ca.pem; then
        echo "ca: the CA ends within $renew days, so clients need its new certificate"
    elif [ ! -e "$file" ]; then
        echo "there is no certificate"
    elif ends_soon "$file"; then
        echo "the certificate ends within $renew days"
    elif ! openssl verify -CAfile ca.pem "$file" >/dev/null 2>&1; then
        echo "the certificate is not one of the host's CA"
    else
        missing=
        for name in "$@"; do
            has_name "$file" "$name" || missing="$missing${missing:+, }$name"
        done
        echo "${missing:+the certificate lacks $missing}"
    fi
}

run_openssl() {
    openssl "$@" 2>"$new/said" && return
    echo "openssl $1 failed, and the gateway's certificate stays as it is: $(cat "$new/said")" >&2
    exit 1
}

make_certificates() { # CA|"" NAME...: each file is complete, with its mode, before it has its name
    ca=$1
    shift
    # Closed to all others.
    new=$(mktemp -d "$directory/.new-XXXXXX")
    trap 'rm -rf "$new"' EXIT
    {
        printf '[req]\ndistinguished_name = name\nprompt = no\n[name]\nCN = vllm-edge %.40s\n' "$(uname -n)"
        printf '[ca]\nbasicConstraints = critical, CA:TRUE, pathlen:0\nkeyUsage = critical, keyCertSign, cRLSign\n'
        printf 'subjectKeyIdentifier = hash\n[server]\nbasicConstraints = critical, CA:FALSE\n'
        printf 'keyUsage = critical, digitalSignature\nextendedKeyUsage = %s\nsubjectAltName = ' "$usage"
        for name in "$@"; do name_as "$name"; done | sort -u | paste -sd,
    } >"$new/openssl.cnf"
    set -- req -config "$new/openssl.cnf" -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes
    at=$directory
    if [ -n "$ca" ]; then
        at=$new
        run_openssl "$@" -x509 -extensions ca -days 3650 -keyout "$new/ca.key" -out "$new/ca.pem"
        chmod 0600 "$new/ca.key"
        chmod 0644 "$new/ca.pem"
    fi
    run_openssl "$@" -new -keyout "$new/server.key" -out "$new/server.csr"
    run_openssl x509 -req -in "$new/server.csr" -CA "$at/ca.pem" -CAkey "$at/ca.key" -set_serial "0x$(openssl rand -hex 19)" \
        -extfile "$new/openssl.cnf" -extensions server -days "$days" -out "$new/server.crt"
    cat "$new/server.key" "$new/server.crt" >"$new/$file"
    chgrp "$group" "$new/$file"
    chmod 0640 "$new/$file"
    for made in ca.key ca.pem "$file"; do
        [ ! -e "$new/$made" ] || mv "$new/$made" "$directory/$made"
    done
}

cd "$directory" 2>/dev/null || cd / # Check mode on a host without it.
fault=$(find_fault "$@")
if [ "$what" = make ] && [ -n "$fault" ]; then
    case "$fault" in
    ca:*) make_certificates ca "$@" ;;
    *) make_certificates "" "$@" ;;
    esac
fi
echo "${fault#ca: }"
[ ! -e "$directory/ca.pem" ] || cat "$directory/ca.pem"
