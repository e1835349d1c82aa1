# SPDX-License-Identifier: Apache-2.0
# What our modules use of ansible-core, which carries no type information. The rest of it stays untyped.
