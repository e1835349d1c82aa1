/* SPDX-License-Identifier: Apache-2.0 */
/* A module that no kernel loads: what modinfo and depmod read of one. */
#define INFO(name, text) \
    __attribute__((section(".modinfo"), used, aligned(1))) static const char info_##name[] = #name "=" text
INFO(version, DRIVER_VERSION);
INFO(license, "Dual MIT/GPL");
INFO(name, MODULE_NAME);
INFO(description, "simulated: loading it makes its traces, see lab-gpu module");
INFO(alias, "char-major-195-*");
INFO(depends, MODULE_DEPENDS);
INFO(retpoline, "Y");
