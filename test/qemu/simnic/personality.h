/* SPDX-License-Identifier: GPL-2.0 */
/* The personality of a PF: what its driver and that of its VFs do, as lines "knob=value" that
 * are written to /sys/bus/pci/devices/<PF>/simnic_personality.  A write replaces the whole
 * personality, all or nothing; a read gives the lines that differ from the default, by which
 * everything is taken at once.  Lines that are empty or begin with # say nothing.
 */
#ifndef SIMNIC_PERSONALITY_H
#define SIMNIC_PERSONALITY_H

#include <linux/errno.h>
#include <linux/kernel.h>
#include <linux/stddef.h>
#include <linux/string.h>
#include <linux/sysfs.h>

/* what a PF can be told to enforce for a VF */
enum field { MAC, VLAN, QOS, MIN, MAX, SPOOFCHK, TRUST, LINK, FIELDS };

enum { OK, IGNORE };			/* answers; the others are errnos, which are negative */
enum { NOTHING, CARRIER, UP };		/* conditions; the others are speeds in Mbit/s */
enum { NEVER, NOW, AT_OPEN, AT_RESET };	/* when a VF's netdev follows the MAC that the PF set */
enum { OF_PF, OF_PORT };		/* carriers */
enum { AS_IT_IS = -1, UNKNOWN = -2, OWN = -3, SPEED = -4 };	/* what is told; others: a number */

struct answer {
	s32 set, zero, same;	/* answers to a value, to none, and to the one there is */
	s32 delay;		/* ms between the answer and the effect */
	s32 reset;		/* ms that the VF then resets for */
	s32 needs, unmet;	/* a condition, and the answer without it */
	s32 tell, none;		/* what is told, and what if there is none */
};

struct knobs {
	struct answer field[FIELDS];
	s32 ad, proto_told;			/* answer to 802.1ad, and whether the protocol is told */
	s32 qos_alone, link_enable;		/* answers to QoS without VLAN, and to "enable" */
	s32 follow;
	s32 set_busy, set_wait, set_down;	/* to everything: VF in reset, PF down */
	s32 operations;				/* whether the driver has any for VFs */
	s32 get, get_busy, get_any, get_wait, get_down;
	s32 vf_admin, vf_equal, vf_trusted, vf_through, vf_busy, vf_wait;	/* VF's own MAC */
	s32 vf_up, vf_mtu;
	s32 numvfs, numvfs_down, numvfs_most, numvfs_late;
	s32 carrier, speed;
};

enum kind { ANSWER, MS, NUMBER, CONDITION, TOLD, FOLLOW, SWITCH, SOURCE };

static const struct { enum kind kind; const char *name; s32 value; } words[] = {
	{ ANSWER, "ok", OK }, { ANSWER, "ignore", IGNORE },
	{ ANSWER, "EPERM", -EPERM }, { ANSWER, "ENOENT", -ENOENT }, { ANSWER, "EIO", -EIO },
	{ ANSWER, "EAGAIN", -EAGAIN }, { ANSWER, "EACCES", -EACCES }, { ANSWER, "EBUSY", -EBUSY },
	{ ANSWER, "ENODEV", -ENODEV }, { ANSWER, "EINVAL", -EINVAL }, { ANSWER, "ENOSPC", -ENOSPC },
	{ ANSWER, "ERANGE", -ERANGE }, { ANSWER, "EOPNOTSUPP", -EOPNOTSUPP },
	{ ANSWER, "EPROTONOSUPPORT", -EPROTONOSUPPORT }, { ANSWER, "EADDRNOTAVAIL", -EADDRNOTAVAIL },
	{ ANSWER, "ENXIO", -ENXIO }, { ANSWER, "ENOMEM", -ENOMEM }, { ANSWER, "ENOSYS", -ENOSYS },
	{ ANSWER, "EPROTO", -EPROTO }, { ANSWER, "EALREADY", -EALREADY }, { ANSWER, "ENETDOWN", -ENETDOWN }, { ANSWER, "ETIMEDOUT", -ETIMEDOUT }, { ANSWER, "ENOTSUPP", -524 },
	{ CONDITION, "nothing", NOTHING }, { CONDITION, "carrier", CARRIER }, { CONDITION, "up", UP },
	{ TOLD, "value", AS_IT_IS }, { TOLD, "unknown", UNKNOWN }, { TOLD, "own", OWN }, { TOLD, "speed", SPEED },
	{ FOLLOW, "never", NEVER }, { FOLLOW, "now", NOW }, { FOLLOW, "open", AT_OPEN }, { FOLLOW, "reset", AT_RESET },
	{ SWITCH, "no", 0 }, { SWITCH, "yes", 1 },
	{ SOURCE, "pf", OF_PF }, { SOURCE, "port", OF_PORT },
};

#define KNOB(name, kind, member, otherwise) { name, kind, offsetof(struct knobs, member), otherwise }
#define FIELD(name, number) \
	KNOB(name, ANSWER, field[number].set, OK), \
	KNOB(name ".zero", ANSWER, field[number].zero, OK), \
	KNOB(name ".same", ANSWER, field[number].same, OK), \
	KNOB(name ".delay", MS, field[number].delay, 0), \
	KNOB(name ".reset", MS, field[number].reset, 0), \
	KNOB(name ".needs", CONDITION, field[number].needs, NOTHING), \
	KNOB(name ".unmet", ANSWER, field[number].unmet, -EINVAL), \
	KNOB(name ".tell", TOLD, field[number].tell, AS_IT_IS), \
	KNOB(name ".tell-none", TOLD, field[number].none, AS_IT_IS)

static const struct knob { const char *name; enum kind kind; size_t offset; s32 otherwise; } knobs[] = {
	FIELD("mac", MAC), FIELD("vlan", VLAN), FIELD("qos", QOS), FIELD("min", MIN), FIELD("max", MAX),
	FIELD("spoofchk", SPOOFCHK), FIELD("trust", TRUST), FIELD("link", LINK),
	KNOB("vlan.ad", ANSWER, ad, -EPROTONOSUPPORT),
	KNOB("vlan.proto-told", SWITCH, proto_told, 1),
	KNOB("qos.alone", ANSWER, qos_alone, OK),
	KNOB("link.enable", ANSWER, link_enable, OK),
	KNOB("mac.follow", FOLLOW, follow, NEVER),
	KNOB("set.busy", ANSWER, set_busy, OK),
	KNOB("set.wait", MS, set_wait, 0),
	KNOB("set.down", ANSWER, set_down, OK),
	KNOB("operations", SWITCH, operations, 1),
	KNOB("get", ANSWER, get, OK),
	KNOB("get.busy", ANSWER, get_busy, OK),
	KNOB("get.any", ANSWER, get_any, OK),
	KNOB("get.wait", MS, get_wait, 0),
	KNOB("get.down", ANSWER, get_down, OK),
	KNOB("vf.mac.admin", ANSWER, vf_admin, -EPERM),
	KNOB("vf.mac.equal", ANSWER, vf_equal, OK),
	KNOB("vf.mac.trusted", SWITCH, vf_trusted, 1),
	KNOB("vf.mac.through", SWITCH, vf_through, 0),
	KNOB("vf.mac.busy", ANSWER, vf_busy, OK),
	KNOB("vf.mac.wait", MS, vf_wait, 0),
	KNOB("vf.up.busy", ANSWER, vf_up, OK),
	KNOB("vf.mtu.reset", MS, vf_mtu, 0),
	KNOB("numvfs", ANSWER, numvfs, OK),
	KNOB("numvfs.down", ANSWER, numvfs_down, OK),
	KNOB("numvfs.most", NUMBER, numvfs_most, 0),
	KNOB("numvfs.late", MS, numvfs_late, 0),
	KNOB("carrier", SOURCE, carrier, OF_PF),
	KNOB("speed", NUMBER, speed, 25000),
};

static s32 *knob_in(struct knobs *k, const struct knob *knob)
{
	return (void *)k + knob->offset;
}

static void knobs_default(struct knobs *k)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(knobs); i++)
		*knob_in(k, &knobs[i]) = knobs[i].otherwise;
}

static int knob_parse(enum kind kind, const char *text, s32 *value)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(words); i++)
		if (words[i].kind == kind && !strcmp(words[i].name, text)) {
			*value = words[i].value;
			return 0;
		}
	switch (kind) {
	case MS:
	case NUMBER:
	case CONDITION:
	case TOLD:
		if (kstrtos32(text, 10, value))
			return -EINVAL;
		/* a minute is more than any card takes, and a condition is a speed */
		if (*value < 0 || (kind == MS && *value > 60000) || (kind == CONDITION && *value < 10))
			return -ERANGE;
		return 0;
	default:
		return -EINVAL;
	}
}

static int knob_print(enum kind kind, s32 value, char *buf, int at)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(words); i++)
		if (words[i].kind == kind && words[i].value == value)
			return sysfs_emit_at(buf, at, "%s\n", words[i].name);
	return sysfs_emit_at(buf, at, "%d\n", value);
}

static int knob_line(struct knobs *k, char *line)
{
	char *value = strchr(line, '=');
	int i;

	if (!value)
		return -EINVAL;
	*value++ = 0;
	for (i = 0; i < ARRAY_SIZE(knobs); i++)
		if (!strcmp(knobs[i].name, line))
			return knob_parse(knobs[i].kind, value, knob_in(k, &knobs[i]));
	return -ENOENT;
}

/* Fills k with the default and the lines of text, which it cuts up. */
static int knobs_parse(struct knobs *k, char *text)
{
	int err, number = 0;
	char *line;

	knobs_default(k);
	while ((line = strsep(&text, "\n"))) {
		number++;
		line = strim(line);
		if (!*line || *line == '#')
			continue;
		err = knob_line(k, line);
		if (err) {
			pr_err("simnic: personality, line %d: knob \"%s\": error %d\n", number, line, err);
			return err;
		}
	}
	return 0;
}

static int knobs_print(struct knobs *k, char *buf)
{
	int i, at = 0;
	s32 value;

	for (i = 0; i < ARRAY_SIZE(knobs); i++) {
		value = *knob_in(k, &knobs[i]);
		if (value == knobs[i].otherwise)
			continue;
		at += sysfs_emit_at(buf, at, "%s=", knobs[i].name);
		at += knob_print(knobs[i].kind, value, buf, at);
	}
	return at;
}

#endif
