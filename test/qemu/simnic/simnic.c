// SPDX-License-Identifier: GPL-2.0
/* simnic: a software eswitch NIC on top of any PCI function that has an SR-IOV
 * capability (QEMU's igb: 8086:10c9, VFs 8086:10ca).  No MMIO is touched: real
 * PCI/sysfs/devlink/auxiliary/netlink objects, software datapath.
 *  - sriov_numvfs -> pci_enable_sriov, one netdev per VF (parent: the VF)
 *  - legacy: MAC switch with VST vlan, spoofchk, trust, rate (up to the speed of 25 Gbit/s),
 *    link-state (ndo_set_vf_*)
 *  - switchdev: pcivf devlink ports + representors; rep <-> function pipe
 *  - devlink port add flavour pcisf; port function hw_addr/state; an active SF
 *    is an auxiliary device <auxprefix>.sf.N with an sfnum file and a netdev
 *  - devlink rate objects; health reporters "fw" of the PF and "vnic" of each VF's port:
 *    simnic_break takes "1" (or "1 N" for VF N), an error that recovery fails for until
 *    "0" (or "0 N"), and "x", an error that is recovered at once
 *  - ethtool: channels, RSS (table, key, hash function)
 *  - personality.h: what a PF and its VFs do otherwise than the rest, changed while they run;
 *    simnic_vfs has what is in effect for each VF, whatever the PF tells
 *  - RoCE devices without verbs of the VFs of a PF whose simnic_rdma is "1": they have GIDs and
 *    a character device, and move between network namespaces as those of cards do
 *  - simnic_infiniband: a PF without VFs, and then its VFs, have the netdevs of InfiniBand
 *  - each VF is a vDPA management device: its vDPA devices are virtio-net to drivers of
 *    the vDPA bus, and carry nothing
 */
#include <linux/module.h>
#include <linux/delay.h>
#include <linux/pci.h>
#include <linux/netdevice.h>
#include <linux/etherdevice.h>
#include <linux/if_arp.h>
#include <linux/if_infiniband.h>
#include <linux/ethtool.h>
#include <linux/rtnetlink.h>
#include <linux/if_link.h>
#include <linux/auxiliary_bus.h>
#include <linux/idr.h>
#include <linux/random.h>
#include <linux/unaligned.h>
#include <linux/vdpa.h>
#include <linux/virtio_ids.h>
#include <linux/virtio_net.h>
#include <uapi/linux/vdpa.h>
#include <net/addrconf.h>
#include <net/devlink.h>
#include <rdma/ib_verbs.h>
#include <rdma/ib_cache.h>

#include "personality.h"

#define MAX_VFS 127
static char *auxprefix = "simnic";
module_param(auxprefix, charp, 0444);
static uint slow;		/* ms that a card takes to tell its eswitch mode */
module_param(slow, uint, 0644);
static DEFINE_IDA(sf_ida);
static DEFINE_IDA(pf_ida);

static DEFINE_MUTEX(rdma_lock);	/* the ib of VFs, and the rdma of PFs */

struct snic_pf;
struct snic_ib;
enum role { UPLINK, REP, FUNC };
/* what a PF enforces for a VF */
struct vf_conf {
	u8 mac[ETH_ALEN];
	u16 vlan;
	u8 qos;
	__be16 proto;
	bool spoofchk, trusted;
	int link, min, max;
};
struct snic_fn {
	struct snic_pf *pf;
	bool sf, active, port_reg, broken;
	struct devlink_health_reporter *hr;
	u32 num;		/* vf number or sfnum */
	int auxid;
	struct net_device __rcu *rep, *dev;
	struct devlink_port port;
	struct auxiliary_device *aux;
	struct vdpa_mgmt_dev vdpa;
	struct snic_ib *ib;
	struct list_head list;
	struct pci_dev *pdev;			/* of a VF that is bound */
	/* what is in effect, and what will be at the time of applies; the VF resets until up */
	struct vf_conf conf, next;
	unsigned long applies, up;		/* jiffies */
	bool applying, resetting;
	struct delayed_work settling, born;
	u64 node_guid, port_guid;		/* rtnl; 0 until the PF is told */
};
enum infiniband { NO_IB, IB, IB_FOLLOWS };	/* whether a VF's driver reads GUIDs later, too */
struct snic_pf {
	struct pci_dev *pdev;
	struct devlink *devlink;
	int id;
	u16 mode;
	int nvfs;
	struct snic_fn *vf[MAX_VFS];
	struct list_head sfs;
	struct net_device *uplink;
	struct devlink_port port;
	struct netdev_phys_item_id swid;
	struct devlink_health_reporter *hr;
	bool broken, rdma;
	struct knobs knobs;	/* rtnl */
	enum infiniband infiniband;
	const struct header_ops *ethernet;	/* of the uplink */
};
#define RINGS 4			/* channels that RSS spreads over, though one queue receives */
#define MAX_RINGS 32
#define RSS_ENTRIES 16
#define RSS_KEY 40
struct snic_nd {
	struct snic_pf *pf; struct snic_fn *fn; enum role role;
	u32 channels;		/* rtnl, as the rest */
	u32 table[RSS_ENTRIES];
	u8 key[RSS_KEY], hash;
};
struct snic_aux { struct auxiliary_device adev; struct snic_fn *fn; };

static void deliver(struct sk_buff *skb, struct net_device *to)
{
	unsigned int len = skb->len;

	if (!to || !netif_running(to)) {
		kfree_skb(skb);
		return;
	}
	if (dev_forward_skb(to, skb) == NET_RX_SUCCESS)
		dev_sw_netstats_rx_add(to, len);
}

/* legacy mode: one L2 switch per PF; from == NULL is the PF itself */
static void l2switch(struct snic_pf *pf, struct snic_fn *from, struct sk_buff *skb)
{
	struct ethhdr *eth = (struct ethhdr *)skb->data;
	bool mc = is_multicast_ether_addr(eth->h_dest);
	u16 vlan = from ? from->conf.vlan : 0;
	struct net_device *d;
	struct sk_buff *c;
	int i;

	if (from && from->conf.spoofchk) {
		/* without an administrative address it is the VF's own */
		const u8 *mac = from->conf.mac;

		d = rcu_dereference(from->dev);
		if (d && is_zero_ether_addr(mac))
			mac = d->dev_addr;
		if (!ether_addr_equal(eth->h_source, mac))
			goto drop;
	}
	for (i = 0; i < MAX_VFS; i++) {
		struct snic_fn *f = READ_ONCE(pf->vf[i]);

		if (!f || f == from || f->conf.vlan != vlan)
			continue;
		d = rcu_dereference(f->dev);
		if (!d)
			continue;
		if (mc) {
			c = skb_clone(skb, GFP_ATOMIC);
			if (c)
				deliver(c, d);
		} else if (ether_addr_equal(eth->h_dest, d->dev_addr)) {
			deliver(skb, d);
			return;
		}
	}
	if (from && !vlan && (mc || ether_addr_equal(eth->h_dest, pf->uplink->dev_addr))) {
		deliver(skb, pf->uplink);
		return;
	}
drop:
	kfree_skb(skb);
}

static netdev_tx_t snic_xmit(struct sk_buff *skb, struct net_device *dev)
{
	struct snic_nd *nd = netdev_priv(dev);
	unsigned int len = skb->len;
	struct net_device *rep;

	if (dev->type == ARPHRD_INFINIBAND) {	/* there is no fabric */
		kfree_skb(skb);
		return NETDEV_TX_OK;
	}
	dev_sw_netstats_tx_add(dev, 1, len);
	skb_tx_timestamp(skb);
	rcu_read_lock();
	switch (nd->role) {
	case REP:
		deliver(skb, rcu_dereference(nd->fn->dev));
		break;
	case FUNC:
		rep = rcu_dereference(nd->fn->rep);
		if (rep)
			deliver(skb, rep);
		else if (nd->pf->mode == DEVLINK_ESWITCH_MODE_LEGACY)
			l2switch(nd->pf, nd->fn, skb);
		else
			kfree_skb(skb);
		break;
	default:
		if (nd->pf->mode == DEVLINK_ESWITCH_MODE_LEGACY)
			l2switch(nd->pf, NULL, skb);
		else
			kfree_skb(skb);	/* the wire */
	}
	rcu_read_unlock();
	return NETDEV_TX_OK;
}

static void fn_carrier(struct snic_fn *f)	/* rtnl */
{
	struct net_device *d = rtnl_dereference(f->dev), *r = rtnl_dereference(f->rep);
	bool on;

	if (!d)
		return;
	if (f->resetting)
		on = false;
	else if (r)
		on = netif_running(r);
	else if (f->conf.link != IFLA_VF_LINK_STATE_AUTO)
		on = f->conf.link == IFLA_VF_LINK_STATE_ENABLE;
	else if (f->pf->knobs.carrier == OF_PORT)
		on = true;
	else
		on = netif_running(f->pf->uplink) && netif_carrier_ok(f->pf->uplink);
	if (on)
		netif_carrier_on(d);
	else
		netif_carrier_off(d);
	if (r) {
		if (netif_running(d))
			netif_carrier_on(r);
		else
			netif_carrier_off(r);
	}
}

static void fn_settle_work(struct work_struct *w);
static void fn_born_work(struct work_struct *w);

static void refresh(struct net_device *dev)
{
	struct snic_nd *nd = netdev_priv(dev);
	int i;

	if (nd->fn)
		fn_carrier(nd->fn);
	else
		for (i = 0; i < MAX_VFS; i++)
			if (nd->pf->vf[i])
				fn_carrier(nd->pf->vf[i]);
}
/* ---- a VF that settles: what was asked for comes into effect later, and resets end. All of
 * it is under rtnl, and due by time, so that whoever holds rtnl may wait for it.
 */
static void fn_follow(struct snic_fn *f, s32 when)
{
	struct net_device *d = rtnl_dereference(f->dev);

	if (!d || f->pf->knobs.follow != when || !is_valid_ether_addr(f->conf.mac) ||
	    ether_addr_equal(d->dev_addr, f->conf.mac))
		return;
	eth_hw_addr_set(d, f->conf.mac);
	call_netdevice_notifiers(NETDEV_CHANGEADDR, d);
}

static void fn_apply(struct snic_fn *f)
{
	f->applying = false;
	f->conf = f->next;
	fn_follow(f, NOW);
	fn_carrier(f);
}

static void fn_settle(struct snic_fn *f)
{
	if (f->applying && time_after_eq(jiffies, f->applies))
		fn_apply(f);
	if (f->resetting && time_after_eq(jiffies, f->up)) {
		f->resetting = false;
		fn_follow(f, AT_RESET);
		fn_carrier(f);
	}
}

static void fn_settle_work(struct work_struct *w)
{
	struct snic_fn *f = container_of(to_delayed_work(w), struct snic_fn, settling);

	rtnl_lock();
	fn_settle(f);
	if (f->applying || f->resetting)
		schedule_delayed_work(&f->settling, 1);
	rtnl_unlock();
}

static void fn_reset(struct snic_fn *f, s32 ms)
{
	if (!ms)
		return;
	f->resetting = true;
	f->up = jiffies + msecs_to_jiffies(ms);
	fn_carrier(f);
	schedule_delayed_work(&f->settling, 1);
}

/* Waits for the end of a reset, and says whether the VF is still in it. */
static bool fn_busy(struct snic_fn *f, s32 ms)
{
	unsigned long end = jiffies + msecs_to_jiffies(ms);

	fn_settle(f);
	while (f->resetting && time_before(jiffies, end)) {
		msleep(1);
		fn_settle(f);
	}
	return f->resetting;
}

static int snic_open(struct net_device *dev)
{
	struct snic_nd *nd = netdev_priv(dev);
	struct knobs *k = &nd->pf->knobs;

	if (nd->role == FUNC && !nd->fn->sf) {
		if (fn_busy(nd->fn, 0) && k->vf_up != OK)
			return k->vf_up;
		fn_follow(nd->fn, AT_OPEN);
	}
	if (nd->role == UPLINK)
		netif_carrier_on(dev);
	netif_start_queue(dev);
	refresh(dev);
	return 0;
}

static int snic_stop(struct net_device *dev)
{
	netif_stop_queue(dev);
	netif_carrier_off(dev);
	refresh(dev);
	return 0;
}

/* ---- what the PF is told and tells */
static struct snic_fn *vfget(struct net_device *dev, int vf)
{
	struct snic_nd *nd = netdev_priv(dev);

	return vf >= 0 && vf < nd->pf->nvfs ? nd->pf->vf[vf] : NULL;
}

static bool met(struct snic_pf *pf, s32 condition)
{
	if (condition == NOTHING)
		return true;
	if (!netif_running(pf->uplink))
		return false;
	return condition == UP || (netif_carrier_ok(pf->uplink) &&
				   (condition == CARRIER || condition == pf->knobs.speed));
}

/* The answer to one field, whose value is none, or the same as before. */
static int ask(struct snic_fn *f, enum field field, bool none, bool same)
{
	struct answer *a = &f->pf->knobs.field[field];
	int answer = none ? a->zero : a->set;

	if (same && a->same != OK)
		answer = a->same;
	if (answer == OK && !met(f->pf, a->needs))
		answer = a->unmet;
	return answer;
}

/* The answer to everything that a PF is told. */
static int ask_pf(struct snic_fn *f)
{
	struct knobs *k = &f->pf->knobs;

	if (k->set_down != OK && !netif_running(f->pf->uplink))
		return k->set_down;
	if (k->set_busy != OK && fn_busy(f, k->set_wait))
		return k->set_busy;
	fn_settle(f);
	return OK;
}

/* A field of next was changed: it has its effect now or later, and the VF resets. */
static void changed(struct snic_fn *f, enum field field)
{
	struct answer *a = &f->pf->knobs.field[field];

	if (a->delay) {
		f->applying = true;
		f->applies = jiffies + msecs_to_jiffies(a->delay);
		schedule_delayed_work(&f->settling, 1);
	} else if (!f->applying) {
		fn_apply(f);
	}
	fn_reset(f, a->reset);
}

/* Sets f to the VF, and returns if the PF does not take anything for it. */
#define VF(dev, n) \
	struct snic_fn *f = vfget(dev, n); \
	int err; \
	if (!f) \
		return -EINVAL; \
	err = ask_pf(f); \
	if (err) \
		return min(err, 0)

static int vf_mac(struct net_device *d, int vf, u8 *mac)
{
	VF(d, vf);
	if (is_multicast_ether_addr(mac))
		return -EINVAL;
	err = ask(f, MAC, is_zero_ether_addr(mac), ether_addr_equal(mac, f->next.mac));
	if (err)
		return min(err, 0);
	ether_addr_copy(f->next.mac, mac);
	changed(f, MAC);
	return 0;
}

static int vf_vlan(struct net_device *d, int vf, u16 vlan, u8 qos, __be16 proto)
{
	struct knobs *k;

	VF(d, vf);
	k = &f->pf->knobs;
	if (vlan > 4095 || qos > 7)
		return -EINVAL;
	if (proto != htons(ETH_P_8021Q) && proto != htons(ETH_P_8021AD))
		return -EPROTONOSUPPORT;
	if (proto == htons(ETH_P_8021AD) && k->ad != OK)
		return min(k->ad, 0);
	if (qos && !vlan && k->qos_alone != OK)
		return min(k->qos_alone, 0);
	err = ask(f, VLAN, !vlan, vlan == f->next.vlan && qos == f->next.qos);
	if (err)
		return min(err, 0);
	err = ask(f, QOS, !qos, qos == f->next.qos);
	if (err < 0)
		return err;
	f->next.vlan = vlan;
	f->next.qos = err == IGNORE ? 0 : qos;
	f->next.proto = proto;
	changed(f, VLAN);
	return 0;
}

static int vf_rate(struct net_device *d, int vf, int min, int max)
{
	int limit;

	VF(d, vf);
	limit = f->pf->knobs.speed;
	if (min < 0 || max < 0 || max > limit || (max && min > max))
		return -EINVAL;
	err = ask(f, MIN, !min, min == f->next.min);
	if (err < 0)
		return err;
	if (err == IGNORE)
		min = f->next.min;
	err = ask(f, MAX, !max, max == f->next.max);
	if (err < 0)
		return err;
	if (err == IGNORE)
		max = f->next.max;
	f->next.min = min;
	f->next.max = max;
	changed(f, MAX);
	return 0;
}

static int vf_spoof(struct net_device *d, int vf, bool v)
{
	VF(d, vf);
	err = ask(f, SPOOFCHK, !v, v == f->next.spoofchk);
	if (err)
		return min(err, 0);
	f->next.spoofchk = v;
	changed(f, SPOOFCHK);
	return 0;
}

static int vf_trust(struct net_device *d, int vf, bool v)
{
	VF(d, vf);
	err = ask(f, TRUST, !v, v == f->next.trusted);
	if (err)
		return min(err, 0);
	f->next.trusted = v;
	changed(f, TRUST);
	return 0;
}

static int vf_link(struct net_device *d, int vf, int v)
{
	VF(d, vf);
	err = ask(f, LINK, v == IFLA_VF_LINK_STATE_AUTO, v == f->next.link);
	if (err == OK && v == IFLA_VF_LINK_STATE_ENABLE)
		err = f->pf->knobs.link_enable;
	if (err)
		return min(err, 0);
	f->next.link = v;
	changed(f, LINK);
	return 0;
}

/* What is told in place of a value. */
static u32 told(struct snic_pf *pf, enum field field, u32 value)
{
	struct answer *a = &pf->knobs.field[field];
	s32 tell = a->tell;

	if (tell == AS_IT_IS && !value)
		tell = a->none;
	if (tell == SPEED)
		return pf->knobs.speed;
	return tell < 0 ? value : tell;
}

static int get_answer(struct snic_fn *f)
{
	struct snic_pf *pf = f->pf;
	struct knobs *k = &pf->knobs;
	int i;

	if (k->get != OK)
		return k->get;
	if (k->get_down != OK && !netif_running(pf->uplink))
		return k->get_down;
	if (k->get_busy != OK && fn_busy(f, k->get_wait))
		return k->get_busy;
	for (i = 0; i < pf->nvfs && k->get_any != OK; i++)
		if (fn_busy(pf->vf[i], 0))
			return k->get_any;
	fn_settle(f);
	return OK;
}

static int vf_get(struct net_device *d, int vf, struct ifla_vf_info *ivi)
{
	struct snic_fn *f = vfget(d, vf);
	struct answer *a;
	struct net_device *own;
	int err;

	if (!f)
		return -EINVAL;
	err = get_answer(f);
	if (err)
		return err < 0 ? err : -EOPNOTSUPP;
	a = f->pf->knobs.field;
	own = rtnl_dereference(f->dev);
	ivi->vf = vf;
	ether_addr_copy(ivi->mac, f->conf.mac);
	if (own && (a[MAC].tell == OWN || (a[MAC].none == OWN && is_zero_ether_addr(f->conf.mac))))
		ether_addr_copy(ivi->mac, own->dev_addr);
	ivi->vlan = told(f->pf, VLAN, f->conf.vlan);
	ivi->qos = told(f->pf, QOS, f->conf.qos);
	ivi->vlan_proto = f->pf->knobs.proto_told ? f->conf.proto : 0;
	if (a[SPOOFCHK].tell != UNKNOWN)
		ivi->spoofchk = told(f->pf, SPOOFCHK, f->conf.spoofchk);
	if (a[TRUST].tell != UNKNOWN)
		ivi->trusted = told(f->pf, TRUST, f->conf.trusted);
	ivi->linkstate = told(f->pf, LINK, f->conf.link);
	ivi->min_tx_rate = told(f->pf, MIN, f->conf.min);
	ivi->max_tx_rate = told(f->pf, MAX, f->conf.max);
	return 0;
}

/* ---- what a VF's own driver answers */
static int vf_own_mac(struct snic_fn *f, const u8 *mac)
{
	struct knobs *k = &f->pf->knobs;

	if (fn_busy(f, k->vf_wait) && k->vf_busy != OK)
		return k->vf_busy;
	if (is_zero_ether_addr(f->conf.mac) || (f->conf.trusted && k->vf_trusted))
		return OK;	/* no administrative address, or one that binds nobody */
	return ether_addr_equal(mac, f->conf.mac) ? k->vf_equal : k->vf_admin;
}

static int snic_set_mac(struct net_device *dev, void *p)
{
	struct snic_nd *nd = netdev_priv(dev);
	struct sockaddr *sa = p;
	struct snic_fn *f;
	int err;

	if (nd->role != FUNC || nd->fn->sf)
		return eth_mac_addr(dev, p);
	f = nd->fn;
	err = vf_own_mac(f, sa->sa_data);
	if (err)
		return min(err, 0);
	err = eth_mac_addr(dev, p);
	if (!err && nd->pf->knobs.vf_through) {
		ether_addr_copy(f->conf.mac, sa->sa_data);
		ether_addr_copy(f->next.mac, sa->sa_data);
	}
	return err;
}

static int snic_change_mtu(struct net_device *dev, int mtu)
{
	struct snic_nd *nd = netdev_priv(dev);

	WRITE_ONCE(dev->mtu, mtu);
	if (nd->role == FUNC && !nd->fn->sf && netif_running(dev))
		fn_reset(nd->fn, nd->pf->knobs.vf_mtu);
	return 0;
}

static const struct net_device_ops ops_uplink = {
	.ndo_open = snic_open, .ndo_stop = snic_stop, .ndo_start_xmit = snic_xmit,
	.ndo_set_mac_address = eth_mac_addr, .ndo_validate_addr = eth_validate_addr,
	.ndo_set_vf_mac = vf_mac, .ndo_set_vf_vlan = vf_vlan, .ndo_set_vf_rate = vf_rate,
	.ndo_set_vf_spoofchk = vf_spoof, .ndo_set_vf_trust = vf_trust,
	.ndo_set_vf_link_state = vf_link, .ndo_get_vf_config = vf_get,
};
/* of a driver that does not know VFs */
static const struct net_device_ops ops_uplink_bare = {
	.ndo_open = snic_open, .ndo_stop = snic_stop, .ndo_start_xmit = snic_xmit,
	.ndo_set_mac_address = eth_mac_addr, .ndo_validate_addr = eth_validate_addr,
};
static const struct net_device_ops ops_fn = {
	.ndo_open = snic_open, .ndo_stop = snic_stop, .ndo_start_xmit = snic_xmit,
	.ndo_set_mac_address = snic_set_mac, .ndo_validate_addr = eth_validate_addr,
	.ndo_change_mtu = snic_change_mtu,
};
/* ---- InfiniBand: what IPoIB does over mlx5_ib, without anything that sends */
#define IB_GUID 12			/* where the port's GUID is in an address */
static const u8 ib_broadcast[INFINIBAND_ALEN] = {
	0x00, 0xff, 0xff, 0xff, 0xff, 0x12, 0x40, 0x1b, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff,
};

static void ib_setup(struct net_device *dev)
{
	dev->type = ARPHRD_INFINIBAND;
	dev->addr_len = INFINIBAND_ALEN;
	dev->header_ops = NULL;
	memcpy(dev->broadcast, ib_broadcast, INFINIBAND_ALEN);
}

/* The number of the queue pair is another one for each netdev. */
static void ib_address(struct net_device *dev, u64 guid)
{
	u8 address[INFINIBAND_ALEN] = { [4] = 0xfe, [5] = 0x80 };

	get_random_bytes(address + 1, 3);
	put_unaligned_be64(guid, address + IB_GUID);
	__dev_addr_set(dev, address, INFINIBAND_ALEN);
}

/* Only the GUID can be set (ipoib_check_lladdr). */
static int ib_set_mac(struct net_device *dev, void *p)
{
	struct sockaddr_storage *ss = p;
	const u8 *to = (const u8 *)ss->__data;

	if (netif_running(dev))
		return -EBUSY;
	if (memcmp(dev->dev_addr, to, IB_GUID) || !get_unaligned_be64(to + IB_GUID))
		return -EINVAL;
	dev_addr_mod(dev, IB_GUID, to + IB_GUID, sizeof(u64));
	return 0;
}

static int ib_set_guid(struct net_device *d, int vf, u64 guid, int type)
{
	struct net_device *own;
	__be64 raw = cpu_to_be64(guid);

	VF(d, vf);
	if (type == IFLA_VF_IB_NODE_GUID)
		f->node_guid = guid;
	else if (type == IFLA_VF_IB_PORT_GUID)
		f->port_guid = guid;
	else
		return -EINVAL;
	own = rtnl_dereference(f->dev);
	if (type == IFLA_VF_IB_PORT_GUID && own && f->pf->infiniband == IB_FOLLOWS) {
		dev_addr_mod(own, IB_GUID, &raw, sizeof(raw));
		call_netdevice_notifiers(NETDEV_CHANGEADDR, own);
	}
	return 0;
}

static int ib_get_guid(struct net_device *d, int vf, struct ifla_vf_guid *node, struct ifla_vf_guid *port)
{
	struct snic_fn *f = vfget(d, vf);

	if (!f)
		return -EINVAL;
	node->vf = port->vf = vf;
	node->guid = f->node_guid;
	port->guid = f->port_guid;
	return 0;
}

static int ib_vf_get(struct net_device *d, int vf, struct ifla_vf_info *ivi)
{
	struct snic_fn *f = vfget(d, vf);

	if (!f)
		return -EINVAL;
	memset(ivi, 0, sizeof(*ivi));
	ivi->vf = vf;
	ivi->linkstate = f->conf.link;
	memcpy(ivi->mac, d->dev_addr, d->addr_len);	/* its own, as ipoib_get_vf_config */
	return 0;
}
static const struct net_device_ops ops_ib_uplink = {
	.ndo_open = snic_open, .ndo_stop = snic_stop, .ndo_start_xmit = snic_xmit,
	.ndo_set_mac_address = ib_set_mac, .ndo_set_vf_link_state = vf_link, .ndo_get_vf_config = ib_vf_get,
	.ndo_set_vf_guid = ib_set_guid, .ndo_get_vf_guid = ib_get_guid,
};
static const struct net_device_ops ops_ib_fn = {
	.ndo_open = snic_open, .ndo_stop = snic_stop, .ndo_start_xmit = snic_xmit,
	.ndo_set_mac_address = ib_set_mac, .ndo_change_mtu = snic_change_mtu,
};
/* Makes the netdev of a VF one of InfiniBand, before it is registered. */
static void ib_fn(struct net_device *dev, struct snic_fn *f)
{
	ib_setup(dev);
	ib_address(dev, f->port_guid);
	dev->features |= NETIF_F_VLAN_CHALLENGED;
	dev->netdev_ops = &ops_ib_fn;
}
/* Makes the netdev of a PF one of InfiniBand, or of Ethernet. */
static void ib_uplink(struct net_device *dev, bool on)	/* rtnl; the netdev is down */
{
	struct snic_nd *nd = netdev_priv(dev);

	call_netdevice_notifiers(NETDEV_PRE_TYPE_CHANGE, dev);
	if (on) {
		nd->pf->ethernet = dev->header_ops;
		ib_setup(dev);
		ib_address(dev, 0x0200000000000000ULL | nd->pf->id);
		dev->netdev_ops = &ops_ib_uplink;
	} else {
		dev->type = ARPHRD_ETHER;
		dev->addr_len = ETH_ALEN;
		dev->header_ops = nd->pf->ethernet;
		eth_broadcast_addr(dev->broadcast);
		eth_hw_addr_random(dev);
		dev->netdev_ops = &ops_uplink;
	}
	call_netdevice_notifiers(NETDEV_POST_TYPE_CHANGE, dev);
}
static ssize_t simnic_infiniband_show(struct device *d, struct device_attribute *a, char *buf)
{
	struct snic_pf *pf = dev_get_drvdata(d);
	int i, n;

	rtnl_lock();
	n = sysfs_emit(buf, "%d\n", pf->infiniband);
	for (i = 0; i < pf->nvfs; i++)
		n += sysfs_emit_at(buf, n, "%d node %016llx port %016llx\n", i, pf->vf[i]->node_guid,
				   pf->vf[i]->port_guid);
	rtnl_unlock();
	return n;
}
static ssize_t simnic_infiniband_store(struct device *d, struct device_attribute *a, const char *b, size_t n)
{
	struct snic_pf *pf = dev_get_drvdata(d);
	unsigned int to;
	int err = kstrtouint(b, 10, &to);

	if (err || to > IB_FOLLOWS)
		return err ?: -EINVAL;
	rtnl_lock();
	if (pf->nvfs || netif_running(pf->uplink)) {
		err = -EBUSY;
	} else {
		if (!!to != (pf->infiniband != NO_IB))
			ib_uplink(pf->uplink, to);
		pf->infiniband = to;
	}
	rtnl_unlock();
	return err ?: n;
}
static DEVICE_ATTR_RW(simnic_infiniband);
static int link_ks(struct net_device *d, struct ethtool_link_ksettings *c)
{
	struct snic_nd *nd = netdev_priv(d);

	c->base.speed = READ_ONCE(nd->pf->knobs.speed); c->base.duplex = DUPLEX_FULL; c->base.port = PORT_OTHER;
	return 0;
}
/* ---- channels and RSS, which are kept, and have no effect */
static int rxnfc_get(struct net_device *d, struct ethtool_rxnfc *c, u32 *rules)
{
	if (c->cmd != ETHTOOL_GRXRINGS)
		return -EOPNOTSUPP;
	c->data = ((struct snic_nd *)netdev_priv(d))->channels;
	return 0;
}
static void default_table(struct snic_nd *nd)
{
	int i;

	for (i = 0; i < RSS_ENTRIES; i++)
		nd->table[i] = ethtool_rxfh_indir_default(i, nd->channels);
}
static void channels_get(struct net_device *d, struct ethtool_channels *c)
{
	struct snic_nd *nd = netdev_priv(d);

	c->max_combined = MAX_RINGS;
	c->combined_count = nd->channels;
}
static int channels_set(struct net_device *d, struct ethtool_channels *c)
{
	struct snic_nd *nd = netdev_priv(d);

	if (!c->combined_count)
		return -EINVAL;
	nd->channels = c->combined_count;
	if (!netif_is_rxfh_configured(d))	/* as mlx5_core */
		default_table(nd);
	return 0;
}
static u32 rss_entries(struct net_device *d) { return RSS_ENTRIES; }
static u32 rss_key(struct net_device *d) { return RSS_KEY; }
static int rss_get(struct net_device *d, struct ethtool_rxfh_param *p)
{
	struct snic_nd *nd = netdev_priv(d);

	p->hfunc = nd->hash;
	if (p->indir)
		memcpy(p->indir, nd->table, sizeof(nd->table));
	if (p->key)
		memcpy(p->key, nd->key, sizeof(nd->key));
	return 0;
}
static int rss_set(struct net_device *d, struct ethtool_rxfh_param *p, struct netlink_ext_ack *e)
{
	struct snic_nd *nd = netdev_priv(d);

	if (p->hfunc == ETH_RSS_HASH_CRC32)
		return -EOPNOTSUPP;
	if (p->hfunc != ETH_RSS_HASH_NO_CHANGE)
		nd->hash = p->hfunc;
	if (p->indir)
		memcpy(nd->table, p->indir, sizeof(nd->table));
	if (p->key)
		memcpy(nd->key, p->key, sizeof(nd->key));
	return 0;
}
static const struct ethtool_ops eth_ops = {
	.get_link = ethtool_op_get_link, .get_link_ksettings = link_ks,
	.get_rxnfc = rxnfc_get, .get_channels = channels_get, .set_channels = channels_set,
	.get_rxfh_indir_size = rss_entries, .get_rxfh_key_size = rss_key,
	.get_rxfh = rss_get, .set_rxfh = rss_set,
};
static void driver_defaults(struct snic_nd *nd)
{
	int i;

	nd->hash = ETH_RSS_HASH_TOP;
	nd->channels = RINGS;
	default_table(nd);
	for (i = 0; i < RSS_KEY; i++)
		nd->key[i] = i + 1;
}

static struct net_device *mknd(struct snic_pf *pf, struct snic_fn *fn, enum role role,
			       struct device *parent, struct devlink_port *port, const u8 *mac)
{
	struct net_device *dev = alloc_etherdev(sizeof(struct snic_nd));
	struct snic_nd *nd;
	int err;

	if (!dev)
		return ERR_PTR(-ENOMEM);
	nd = netdev_priv(dev);
	nd->pf = pf; nd->fn = fn; nd->role = role;
	driver_defaults(nd);
	dev->netdev_ops = role == UPLINK ? &ops_uplink : &ops_fn;
	dev->ethtool_ops = &eth_ops;
	dev->pcpu_stat_type = NETDEV_PCPU_STAT_TSTATS;
	dev->max_mtu = 9978;
	dev->features |= NETIF_F_HW_TC;
	dev->hw_features |= NETIF_F_HW_TC;
	SET_NETDEV_DEV(dev, parent);
	if (mac && is_valid_ether_addr(mac))
		eth_hw_addr_set(dev, mac);
	else
		eth_hw_addr_random(dev);
	if (role == FUNC && !fn->sf && pf->infiniband)
		ib_fn(dev, fn);
	netif_carrier_off(dev);
	if (port)
		SET_NETDEV_DEVLINK_PORT(dev, port);
	err = register_netdev(dev);
	if (err) {
		free_netdev(dev);
		return ERR_PTR(err);
	}
	return dev;
}
static void rmnd(struct net_device __rcu **slot)
{
	struct net_device *d;

	rtnl_lock();
	d = rtnl_dereference(*slot);
	if (d) {
		RCU_INIT_POINTER(*slot, NULL);
		unregister_netdevice(d);	/* synchronizes */
	}
	rtnl_unlock();
	if (d)
		free_netdev(d);
}

/* ---- devlink port functions */
static struct snic_fn *p2f(struct devlink_port *p) { return container_of(p, struct snic_fn, port); }
static int fn_mac_get(struct devlink_port *p, u8 *a, int *l, struct netlink_ext_ack *e)
{
	ether_addr_copy(a, p2f(p)->conf.mac);
	*l = ETH_ALEN;
	return 0;
}
static int fn_mac_set(struct devlink_port *p, const u8 *a, int l, struct netlink_ext_ack *e)
{
	ether_addr_copy(p2f(p)->conf.mac, a);
	ether_addr_copy(p2f(p)->next.mac, a);
	return 0;
}
static int fn_state_get(struct devlink_port *p, enum devlink_port_fn_state *s,
			enum devlink_port_fn_opstate *o, struct netlink_ext_ack *e)
{
	struct snic_fn *f = p2f(p);

	*s = f->active ? DEVLINK_PORT_FN_STATE_ACTIVE : DEVLINK_PORT_FN_STATE_INACTIVE;
	*o = rcu_access_pointer(f->dev) ? DEVLINK_PORT_FN_OPSTATE_ATTACHED : DEVLINK_PORT_FN_OPSTATE_DETACHED;
	return 0;
}
static ssize_t sfnum_show(struct device *d, struct device_attribute *a, char *buf)
{
	return sysfs_emit(buf, "%u\n", container_of(to_auxiliary_dev(d), struct snic_aux, adev)->fn->num);
}
static DEVICE_ATTR_RO(sfnum);
static struct attribute *sf_attrs[] = { &dev_attr_sfnum.attr, NULL };
ATTRIBUTE_GROUPS(sf);
static void aux_release(struct device *d) { kfree(container_of(to_auxiliary_dev(d), struct snic_aux, adev)); }
static int sf_activate(struct snic_fn *f)
{
	struct snic_aux *x = kzalloc(sizeof(*x), GFP_KERNEL);
	int err;

	if (!x)
		return -ENOMEM;
	x->fn = f;
	x->adev.id = f->auxid;
	x->adev.name = "sf";
	x->adev.dev.parent = &f->pf->pdev->dev;
	x->adev.dev.release = aux_release;
	x->adev.dev.groups = sf_groups;
	err = auxiliary_device_init(&x->adev);
	if (err) {
		kfree(x);
		return err;
	}
	err = __auxiliary_device_add(&x->adev, auxprefix);
	if (err) {
		auxiliary_device_uninit(&x->adev);
		return err;
	}
	f->aux = &x->adev;
	f->active = true;
	return 0;
}
static void sf_deactivate(struct snic_fn *f)
{
	if (f->aux) {
		auxiliary_device_delete(f->aux);
		auxiliary_device_uninit(f->aux);
	}
	f->aux = NULL;
	f->active = false;
}
static int fn_state_set(struct devlink_port *p, enum devlink_port_fn_state s, struct netlink_ext_ack *e)
{
	struct snic_fn *f = p2f(p);

	if ((s == DEVLINK_PORT_FN_STATE_ACTIVE) == f->active)
		return 0;
	if (f->active) {
		sf_deactivate(f);
		return 0;
	}
	return sf_activate(f);
}
static int sf_del(struct devlink *dl, struct devlink_port *p, struct netlink_ext_ack *e);
static const struct devlink_port_ops vf_port_ops = {
	.port_fn_hw_addr_get = fn_mac_get, .port_fn_hw_addr_set = fn_mac_set,
};
static const struct devlink_port_ops sf_port_ops = {
	.port_del = sf_del,
	.port_fn_hw_addr_get = fn_mac_get, .port_fn_hw_addr_set = fn_mac_set,
	.port_fn_state_get = fn_state_get, .port_fn_state_set = fn_state_set,
};

/* ---- health: what a reporter has as its priv says whether recovery fails */
static int hr_recover(struct devlink_health_reporter *r, void *c, struct netlink_ext_ack *e)
{
	bool *broken = devlink_health_reporter_priv(r);

	return READ_ONCE(*broken) ? -EIO : 0;
}
static int hr_diag(struct devlink_health_reporter *r, struct devlink_fmsg *m, struct netlink_ext_ack *e)
{
	devlink_fmsg_string_pair_put(m, "Synd", "0x0");
	return 0;
}
static const struct devlink_health_reporter_ops hr_ops = { .name = "fw", .recover = hr_recover, .diagnose = hr_diag };
static const struct devlink_health_reporter_ops hr_port_ops = {
	.name = "vnic", .recover = hr_recover, .diagnose = hr_diag,
};
static void fn_hr_del(struct snic_fn *f)
{
	if (!IS_ERR_OR_NULL(f->hr))
		devl_health_reporter_destroy(f->hr);
	f->hr = NULL;
}
static int fn_rep_add(struct snic_fn *f)	/* devl lock */
{
	struct snic_pf *pf = f->pf;
	struct devlink_port_attrs a = { .switch_id = pf->swid };
	struct net_device *rep;
	int err;

	memset(&f->port, 0, sizeof(f->port));
	devlink_port_attrs_set(&f->port, &a);
	if (f->sf)
		devlink_port_attrs_pci_sf_set(&f->port, 0, pf->id, f->num, false);
	else
		devlink_port_attrs_pci_vf_set(&f->port, 0, pf->id, f->num, false);
	err = devl_port_register_with_ops(pf->devlink, &f->port, f->sf ? 32768 + f->auxid : 1 + f->num,
					  f->sf ? &sf_port_ops : &vf_port_ops);
	if (err)
		return err;
	f->port_reg = true;
	devl_rate_leaf_create(&f->port, f, NULL);
	if (!f->sf)
		f->hr = devl_port_health_reporter_create(&f->port, &hr_port_ops, 0, &f->broken);
	rep = mknd(pf, f, REP, &pf->pdev->dev, &f->port, NULL);
	if (IS_ERR(rep)) {
		fn_hr_del(f);
		devl_rate_leaf_destroy(&f->port);
		devl_port_unregister(&f->port);
		f->port_reg = false;
		return PTR_ERR(rep);
	}
	rtnl_lock();
	rcu_assign_pointer(f->rep, rep);
	fn_carrier(f);
	rtnl_unlock();
	return 0;
}
static void fn_rep_del(struct snic_fn *f)
{
	if (!f->port_reg)
		return;
	rmnd(&f->rep);
	fn_hr_del(f);
	devl_rate_leaf_destroy(&f->port);
	devl_port_unregister(&f->port);
	f->port_reg = false;
	rtnl_lock();
	fn_carrier(f);
	rtnl_unlock();
}
static struct snic_fn *fn_new(struct snic_pf *pf, bool sf, u32 num)
{
	struct snic_fn *f = kzalloc(sizeof(*f), GFP_KERNEL);

	if (f) {
		f->pf = pf; f->sf = sf; f->num = num;
		f->conf.proto = f->next.proto = htons(ETH_P_8021Q);
		INIT_DELAYED_WORK(&f->settling, fn_settle_work);
		INIT_DELAYED_WORK(&f->born, fn_born_work);
	}
	return f;
}
static int sf_new(struct devlink *dl, const struct devlink_port_new_attrs *a,
		  struct netlink_ext_ack *e, struct devlink_port **pp)
{
	struct snic_pf *pf = *(struct snic_pf **)devlink_priv(dl);
	struct snic_fn *f;
	int err;

	if (a->flavour != DEVLINK_PORT_FLAVOUR_PCI_SF) {
		NL_SET_ERR_MSG(e, "Driver supports only SF port addition");
		return -EOPNOTSUPP;
	}
	if (pf->mode != DEVLINK_ESWITCH_MODE_SWITCHDEV) {
		NL_SET_ERR_MSG(e, "SF ports are only supported in eswitch switchdev mode");
		return -EOPNOTSUPP;
	}
	if (!a->sfnum_valid || a->pfnum != pf->id || a->port_index_valid)
		return -EINVAL;
	list_for_each_entry(f, &pf->sfs, list)
		if (f->num == a->sfnum)
			return -EEXIST;
	f = fn_new(pf, true, a->sfnum);
	if (!f)
		return -ENOMEM;
	f->auxid = ida_alloc_min(&sf_ida, 2, GFP_KERNEL);
	if (f->auxid < 0) {
		err = f->auxid;
		kfree(f);
		return err;
	}
	err = fn_rep_add(f);
	if (err) {
		ida_free(&sf_ida, f->auxid);
		kfree(f);
		return err;
	}
	list_add_tail(&f->list, &pf->sfs);
	*pp = &f->port;
	return 0;
}
static void sf_destroy(struct snic_fn *f)
{
	sf_deactivate(f);
	fn_rep_del(f);
	list_del(&f->list);
	ida_free(&sf_ida, f->auxid);
	kfree(f);
}
static int sf_del(struct devlink *dl, struct devlink_port *p, struct netlink_ext_ack *e)
{
	sf_destroy(p2f(p));
	return 0;
}
static int mode_get(struct devlink *dl, u16 *m)
{
	msleep(READ_ONCE(slow));
	*m = (*(struct snic_pf **)devlink_priv(dl))->mode;
	return 0;
}
static int mode_set(struct devlink *dl, u16 m, struct netlink_ext_ack *e)
{
	struct snic_pf *pf = *(struct snic_pf **)devlink_priv(dl);
	struct snic_fn *f, *t;
	int i, err;

	if (m == pf->mode)
		return 0;
	if (m == DEVLINK_ESWITCH_MODE_SWITCHDEV) {
		pf->mode = m;
		for (i = 0; i < pf->nvfs; i++) {
			err = fn_rep_add(pf->vf[i]);
			if (!err)
				continue;
			while (i--)
				fn_rep_del(pf->vf[i]);
			pf->mode = DEVLINK_ESWITCH_MODE_LEGACY;
			return err;
		}
		return 0;
	}
	if (m != DEVLINK_ESWITCH_MODE_LEGACY)
		return -EOPNOTSUPP;
	list_for_each_entry_safe(f, t, &pf->sfs, list)
		sf_destroy(f);
	for (i = 0; i < pf->nvfs; i++)
		fn_rep_del(pf->vf[i]);
	pf->mode = m;
	return 0;
}
static int rate_leaf(struct devlink_rate *r, void *p, u64 v, struct netlink_ext_ack *e)
{
	if (v > SPEED_25000 * 125000ULL) {	/* bytes per second */
		NL_SET_ERR_MSG(e, "Rate is above the speed of the port");
		return -EINVAL;
	}
	return 0;
}
/* each PF is a card of its own, by the slot that it is in */
static int info_get(struct devlink *dl, struct devlink_info_req *req, struct netlink_ext_ack *e)
{
	struct snic_pf *pf = *(struct snic_pf **)devlink_priv(dl);
	char serial[16];

	msleep(READ_ONCE(slow));
	snprintf(serial, sizeof(serial), "SIM%04X%02X", pci_domain_nr(pf->pdev->bus), pf->pdev->bus->number);
	return devlink_info_serial_number_put(req, serial) ?:
	       devlink_info_version_fixed_put(req, DEVLINK_INFO_VERSION_GENERIC_BOARD_ID, "simnic-1p");
}
static const struct devlink_ops dl_ops = {
	.info_get = info_get,
	.eswitch_mode_get = mode_get, .eswitch_mode_set = mode_set, .port_new = sf_new,
	.rate_leaf_tx_share_set = rate_leaf, .rate_leaf_tx_max_set = rate_leaf,
};
static ssize_t simnic_break_store(struct device *d, struct device_attribute *a, const char *b, size_t n)
{
	struct snic_pf *pf = dev_get_drvdata(d);
	struct devlink_health_reporter *hr = pf->hr;
	bool *broken = &pf->broken;
	int vf;

	if (sscanf(b + 1, " %d", &vf) == 1) {
		struct snic_fn *f = vf >= 0 && vf < pf->nvfs ? pf->vf[vf] : NULL;

		if (!f || IS_ERR_OR_NULL(f->hr))
			return -ENODEV;	/* there are ports in mode switchdev only */
		hr = f->hr;
		broken = &f->broken;
	}
	WRITE_ONCE(*broken, b[0] == '1');
	if (b[0] == '0')
		devlink_health_reporter_state_update(hr, DEVLINK_HEALTH_REPORTER_STATE_HEALTHY);
	else
		devlink_health_report(hr, "simulated error", NULL);
	return n;
}
static DEVICE_ATTR_WO(simnic_break);

static ssize_t simnic_personality_show(struct device *d, struct device_attribute *a, char *buf)
{
	struct snic_pf *pf = dev_get_drvdata(d);
	int n;

	rtnl_lock();
	n = knobs_print(&pf->knobs, buf);
	rtnl_unlock();
	return n;
}
static ssize_t simnic_personality_store(struct device *d, struct device_attribute *a, const char *b, size_t n)
{
	struct snic_pf *pf = dev_get_drvdata(d);
	char *text = kstrndup(b, n, GFP_KERNEL);
	struct knobs k;
	int err;

	if (!text)
		return -ENOMEM;
	err = knobs_parse(&k, text);
	kfree(text);
	if (err)
		return err;
	rtnl_lock();
	pf->knobs = k;
	if (!pf->infiniband)
		pf->uplink->netdev_ops = k.operations ? &ops_uplink : &ops_uplink_bare;
	refresh(pf->uplink);
	rtnl_unlock();
	return n;
}
static DEVICE_ATTR_RW(simnic_personality);

/* What is in effect for the VFs, a line for each: the witness of what the PF tells. */
static ssize_t simnic_vfs_show(struct device *d, struct device_attribute *a, char *buf)
{
	static const u8 none[ETH_ALEN];
	struct snic_pf *pf = dev_get_drvdata(d);
	struct net_device *own;
	struct vf_conf *c;
	int i, n = 0;

	rtnl_lock();
	for (i = 0; i < pf->nvfs; i++) {
		fn_settle(pf->vf[i]);
		c = &pf->vf[i]->conf;
		own = rtnl_dereference(pf->vf[i]->dev);
		n += sysfs_emit_at(buf, n, "%d mac %pM vlan %u qos %u proto %04x min %d max %d spoofchk %d "
				   "trust %d link %d own %pM resets %d\n", i, c->mac, c->vlan, c->qos,
				   ntohs(c->proto), c->min, c->max, c->spoofchk, c->trusted, c->link,
				   own ? own->dev_addr : none, pf->vf[i]->resetting || pf->vf[i]->applying);
	}
	rtnl_unlock();
	return n;
}
static DEVICE_ATTR_RO(simnic_vfs);

/* ---- RDMA devices. ib_core makes, moves and renames them; the GIDs follow the netdev's addresses. */
#define RDMA_GIDS 32
struct snic_ib { struct ib_device ib; };
struct snic_ctx { struct ib_ucontext ctx; };
static int rdma_device(struct ib_device *ib, struct ib_device_attr *a, struct ib_udata *u)
{
	a->max_pkeys = 1;
	return 0;
}
static int rdma_port(struct ib_device *ib, u32 port, struct ib_port_attr *a)
{
	a->state = IB_PORT_ACTIVE;
	a->phys_state = IB_PORT_PHYS_STATE_LINK_UP;
	a->max_mtu = a->active_mtu = IB_MTU_4096;
	a->active_width = IB_WIDTH_1X;
	a->active_speed = IB_SPEED_EDR;
	a->gid_tbl_len = RDMA_GIDS;
	a->pkey_tbl_len = 1;
	return 0;
}
/* Without IB_MAD among the capabilities no kernel client asks for queues. */
static int rdma_immutable(struct ib_device *ib, u32 port, struct ib_port_immutable *i)
{
	i->core_cap_flags = RDMA_CORE_CAP_PROT_ROCE_UDP_ENCAP;
	i->gid_tbl_len = RDMA_GIDS;
	i->pkey_tbl_len = 1;
	return 0;
}
static enum rdma_link_layer rdma_layer(struct ib_device *ib, u32 port) { return IB_LINK_LAYER_ETHERNET; }
static int rdma_pkey(struct ib_device *ib, u32 port, u16 i, u16 *key)
{
	*key = 0xffff;
	return 0;
}
static int rdma_gid_add(const struct ib_gid_attr *a, void **context) { return 0; }
static int rdma_gid_del(const struct ib_gid_attr *a, void **context) { return 0; }
static int rdma_ctx_new(struct ib_ucontext *c, struct ib_udata *u) { return 0; }
static void rdma_ctx_free(struct ib_ucontext *c) { }
/* Without this operation ib_core moves no device to another network namespace. */
static void rdma_ctx_drop(struct ib_ucontext *c) { }
static const struct ib_device_ops rdma_ops = {
	.owner = THIS_MODULE, .driver_id = RDMA_DRIVER_UNKNOWN, .uverbs_abi_ver = 1,
	.query_device = rdma_device, .query_port = rdma_port, .get_port_immutable = rdma_immutable,
	.get_link_layer = rdma_layer, .query_pkey = rdma_pkey,
	.add_gid = rdma_gid_add, .del_gid = rdma_gid_del,
	.alloc_ucontext = rdma_ctx_new, .dealloc_ucontext = rdma_ctx_free,
	.disassociate_ucontext = rdma_ctx_drop,
	INIT_RDMA_OBJ_SIZE(ib_ucontext, snic_ctx, ctx),
};
static int fn_rdma_add(struct snic_fn *f)	/* rdma_lock */
{
	struct net_device *d = NULL;
	struct snic_ib *s;
	int err;

	rtnl_lock();
	if (!f->ib)
		d = rtnl_dereference(f->dev);
	if (d)
		dev_hold(d);
	rtnl_unlock();
	if (!d)
		return 0;
	s = ib_alloc_device(snic_ib, ib);
	if (!s) {
		dev_put(d);
		return -ENOMEM;
	}
	s->ib.node_type = RDMA_NODE_IB_CA;
	s->ib.phys_port_cnt = 1;
	s->ib.num_comp_vectors = 1;
	s->ib.dev.parent = &f->pdev->dev;
	addrconf_addr_eui48((u8 *)&s->ib.node_guid, d->dev_addr);
	ib_set_device_ops(&s->ib, &rdma_ops);
	err = ib_device_set_netdev(&s->ib, d, 1);
	if (!err)
		err = ib_register_device(&s->ib, "simnic_%d", NULL);
	dev_put(d);
	if (err)
		ib_dealloc_device(&s->ib);
	else
		f->ib = s;
	return err;
}
static void fn_rdma_del(struct snic_fn *f)	/* rdma_lock */
{
	if (!f->ib)
		return;
	ib_unregister_device(&f->ib->ib);
	ib_dealloc_device(&f->ib->ib);
	f->ib = NULL;
}
static ssize_t simnic_rdma_show(struct device *d, struct device_attribute *a, char *buf)
{
	struct snic_pf *pf = dev_get_drvdata(d);

	return sysfs_emit(buf, "%d\n", READ_ONCE(pf->rdma));
}
static ssize_t simnic_rdma_store(struct device *d, struct device_attribute *a, const char *b, size_t n)
{
	struct snic_pf *pf = dev_get_drvdata(d);
	int i, err = 0;
	bool on;

	if (kstrtobool(b, &on))
		return -EINVAL;
	devl_lock(pf->devlink);	/* for the VFs */
	mutex_lock(&rdma_lock);
	WRITE_ONCE(pf->rdma, on);
	for (i = 0; i < pf->nvfs && !err; i++)
		if (on)
			err = fn_rdma_add(pf->vf[i]);
		else
			fn_rdma_del(pf->vf[i]);
	mutex_unlock(&rdma_lock);
	devl_unlock(pf->devlink);
	return err ? err : n;
}
static DEVICE_ATTR_RW(simnic_rdma);

static const struct device_attribute *const pf_attrs[] = {
	&dev_attr_simnic_break, &dev_attr_simnic_personality, &dev_attr_simnic_vfs, &dev_attr_simnic_rdma,
	&dev_attr_simnic_infiniband,
};

/* ---- SF auxiliary driver */
static int sf_probe(struct auxiliary_device *a, const struct auxiliary_device_id *id)
{
	struct snic_fn *f = container_of(a, struct snic_aux, adev)->fn;
	struct net_device *d = mknd(f->pf, f, FUNC, &a->dev, NULL, f->conf.mac);

	if (IS_ERR(d))
		return PTR_ERR(d);
	rtnl_lock();
	rcu_assign_pointer(f->dev, d);
	ether_addr_copy(f->conf.mac, d->dev_addr);
	fn_carrier(f);
	rtnl_unlock();
	return 0;
}
static void sf_remove(struct auxiliary_device *a) { rmnd(&container_of(a, struct snic_aux, adev)->fn->dev); }
static struct auxiliary_device_id sf_ids[2];
static struct auxiliary_driver sf_drv = { .name = "sf", .probe = sf_probe, .remove = sf_remove, .id_table = sf_ids };

/* ---- vDPA: virtio-net devices without a data path */
#define VDPA_VQS 2
struct snic_vdpa {
	struct vdpa_device vdpa;
	u64 features;
	u8 status;
	struct { bool ready; u16 avail; } vq[VDPA_VQS];
	struct virtio_net_config config;
};
static struct snic_vdpa *v2s(struct vdpa_device *v) { return container_of(v, struct snic_vdpa, vdpa); }
static int va_vq_address(struct vdpa_device *v, u16 i, u64 desc, u64 driver, u64 device) { return 0; }
static void va_vq_num(struct vdpa_device *v, u16 i, u32 num) { }
static void va_kick(struct vdpa_device *v, u16 i) { }
static void va_vq_cb(struct vdpa_device *v, u16 i, struct vdpa_callback *cb) { }
static void va_vq_ready(struct vdpa_device *v, u16 i, bool ready) { v2s(v)->vq[i].ready = ready; }
static bool va_vq_is_ready(struct vdpa_device *v, u16 i) { return v2s(v)->vq[i].ready; }
static int va_vq_set_state(struct vdpa_device *v, u16 i, const struct vdpa_vq_state *state)
{
	v2s(v)->vq[i].avail = state->split.avail_index;
	return 0;
}
static int va_vq_get_state(struct vdpa_device *v, u16 i, struct vdpa_vq_state *state)
{
	state->split.avail_index = v2s(v)->vq[i].avail;
	return 0;
}
static u32 va_vq_align(struct vdpa_device *v) { return PAGE_SIZE; }
static u16 va_vq_max(struct vdpa_device *v) { return 256; }
static u64 va_features(struct vdpa_device *v)
{
	return BIT_ULL(VIRTIO_F_VERSION_1) | BIT_ULL(VIRTIO_F_ACCESS_PLATFORM) | BIT_ULL(VIRTIO_NET_F_MAC);
}
static int va_set_features(struct vdpa_device *v, u64 features)
{
	if (features & ~va_features(v))
		return -EINVAL;
	v2s(v)->features = features;
	return 0;
}
static u64 va_get_features(struct vdpa_device *v) { return v2s(v)->features; }
static void va_config_cb(struct vdpa_device *v, struct vdpa_callback *cb) { }
static u32 va_device_id(struct vdpa_device *v) { return VIRTIO_ID_NET; }
static u32 va_vendor_id(struct vdpa_device *v) { return PCI_VENDOR_ID_INTEL; }
static u8 va_get_status(struct vdpa_device *v) { return v2s(v)->status; }
static void va_set_status(struct vdpa_device *v, u8 status) { v2s(v)->status = status; }
static int va_reset(struct vdpa_device *v)
{
	struct snic_vdpa *s = v2s(v);

	s->status = 0;
	s->features = 0;
	memset(s->vq, 0, sizeof(s->vq));
	return 0;
}
static size_t va_config_size(struct vdpa_device *v) { return sizeof(v2s(v)->config); }
static void va_get_config(struct vdpa_device *v, unsigned int offset, void *buf, unsigned int len)
{
	if (offset + len <= sizeof(v2s(v)->config))
		memcpy(buf, (u8 *)&v2s(v)->config + offset, len);
}
static void va_set_config(struct vdpa_device *v, unsigned int offset, const void *buf, unsigned int len) { }
static int va_map(struct vdpa_device *v, unsigned int asid, struct vhost_iotlb *iotlb) { return 0; }
static const struct vdpa_config_ops vdpa_ops = {
	.set_vq_address = va_vq_address, .set_vq_num = va_vq_num, .kick_vq = va_kick, .set_vq_cb = va_vq_cb,
	.set_vq_ready = va_vq_ready, .get_vq_ready = va_vq_is_ready, .set_vq_state = va_vq_set_state,
	.get_vq_state = va_vq_get_state, .get_vq_align = va_vq_align, .get_vq_num_max = va_vq_max,
	.get_device_features = va_features, .set_driver_features = va_set_features,
	.get_driver_features = va_get_features, .set_config_cb = va_config_cb, .get_device_id = va_device_id,
	.get_vendor_id = va_vendor_id, .get_status = va_get_status, .set_status = va_set_status, .reset = va_reset,
	.get_config_size = va_config_size, .get_config = va_get_config, .set_config = va_set_config, .set_map = va_map,
};
static int vdpa_dev_add(struct vdpa_mgmt_dev *m, const char *name, const struct vdpa_dev_set_config *c)
{
	struct snic_fn *f = container_of(m, struct snic_fn, vdpa);
	struct snic_vdpa *s;
	int err;

	s = vdpa_alloc_device(struct snic_vdpa, vdpa, m->device, &vdpa_ops, 1, 1, name, false);
	if (IS_ERR(s))
		return PTR_ERR(s);
	s->vdpa.dma_dev = m->device;
	s->vdpa.mdev = m;
	ether_addr_copy(s->config.mac, f->conf.mac);
	err = _vdpa_register_device(&s->vdpa, VDPA_VQS);
	if (err)
		put_device(&s->vdpa.dev);
	return err;
}
static void vdpa_dev_del(struct vdpa_mgmt_dev *m, struct vdpa_device *v) { _vdpa_unregister_device(v); }
static const struct vdpa_mgmtdev_ops vdpa_mgmt_ops = { .dev_add = vdpa_dev_add, .dev_del = vdpa_dev_del };
static struct virtio_device_id vdpa_ids[] = { { VIRTIO_ID_NET, VIRTIO_DEV_ANY_ID }, { 0 } };
static int fn_vdpa_add(struct snic_fn *f, struct device *parent)
{
	f->vdpa.device = parent;
	f->vdpa.ops = &vdpa_mgmt_ops;
	f->vdpa.id_table = vdpa_ids;
	f->vdpa.max_supported_vqs = VDPA_VQS;
	return vdpa_mgmtdev_register(&f->vdpa);
}

/* ---- PCI */
static int fn_born(struct snic_fn *f)
{
	struct net_device *d = mknd(f->pf, f, FUNC, &f->pdev->dev, NULL, f->conf.mac);

	if (IS_ERR(d))
		return PTR_ERR(d);
	rtnl_lock();
	rcu_assign_pointer(f->dev, d);
	fn_carrier(f);
	rtnl_unlock();
	return 0;
}
static void fn_born_work(struct work_struct *w)
{
	struct snic_fn *f = container_of(to_delayed_work(w), struct snic_fn, born);
	int err = fn_born(f);

	if (err)
		dev_err(&f->pdev->dev, "netdev: %d\n", err);
}
static int vf_probe(struct pci_dev *pdev)
{
	struct snic_pf *pf = pci_get_drvdata(pci_physfn(pdev));
	int n = pci_iov_vf_id(pdev);
	struct snic_fn *f;
	int err;

	if (pci_physfn(pdev)->driver != pdev->driver)
		return -ENODEV;
	f = pf->vf[n];
	f->pdev = pdev;
	pci_set_drvdata(pdev, f);
	if (READ_ONCE(pf->knobs.numvfs_late)) {
		schedule_delayed_work(&f->born, msecs_to_jiffies(pf->knobs.numvfs_late));
	} else {
		err = fn_born(f);
		if (err)
			return err;
	}
	if (fn_vdpa_add(f, &pdev->dev))
		f->vdpa.device = NULL;
	mutex_lock(&rdma_lock);
	if (pf->rdma && fn_rdma_add(f))
		dev_err(&pdev->dev, "no RDMA device\n");
	mutex_unlock(&rdma_lock);
	return 0;
}
static void vfs_free(struct snic_pf *pf)	/* devl lock; their PCI functions are gone */
{
	while (pf->nvfs) {
		struct snic_fn *f = pf->vf[pf->nvfs - 1];

		fn_rep_del(f);
		rtnl_lock();	/* for those who ask for or set what a VF has */
		WRITE_ONCE(pf->vf[--pf->nvfs], NULL);
		rtnl_unlock();
		synchronize_net();	/* for l2switch */
		cancel_delayed_work_sync(&f->settling);
		kfree(f);
	}
}
static int vfs_new(struct snic_pf *pf, int n)	/* devl lock */
{
	struct snic_fn *f;
	int err;

	while (pf->nvfs < n) {
		f = fn_new(pf, false, pf->nvfs);
		if (!f)
			return -ENOMEM;
		if (pf->mode == DEVLINK_ESWITCH_MODE_SWITCHDEV) {
			err = fn_rep_add(f);
			if (err) {
				kfree(f);
				return err;
			}
		}
		rtnl_lock();
		WRITE_ONCE(pf->vf[pf->nvfs++], f);
		rtnl_unlock();
	}
	return 0;
}
static int sriov_answer(struct snic_pf *pf, int *n)
{
	struct knobs *k = &pf->knobs;

	if (k->numvfs != OK)
		return k->numvfs;
	if (k->numvfs_down != OK && !netif_running(pf->uplink))
		return k->numvfs_down;
	if (k->numvfs_most)
		*n = min(*n, k->numvfs_most);
	return OK;
}
static int snic_sriov(struct pci_dev *pdev, int n)
{
	struct snic_pf *pf = pci_get_drvdata(pdev);
	int err = 0;

	if (n > MAX_VFS)
		return -EINVAL;
	if (n) {
		err = sriov_answer(pf, &n);
		if (err)
			return min(err, 0);	/* IGNORE: success, with no VF */
	}
	if (!n)
		pci_disable_sriov(pdev);
	devl_lock(pf->devlink);
	if (n)
		err = vfs_new(pf, n);
	if (!n || err)
		vfs_free(pf);
	devl_unlock(pf->devlink);
	if (!n || err)
		return err;
	err = pci_enable_sriov(pdev, n);	/* probes the VFs */
	if (!err)
		return n;
	devl_lock(pf->devlink);
	vfs_free(pf);
	devl_unlock(pf->devlink);
	return err;
}
static int snic_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct devlink_port_attrs a = { .flavour = DEVLINK_PORT_FLAVOUR_PHYSICAL };
	struct snic_pf *pf;
	int i, err;

	if (pdev->is_virtfn)
		return vf_probe(pdev);
	pf = kzalloc(sizeof(*pf), GFP_KERNEL);
	if (!pf)
		return -ENOMEM;
	pf->pdev = pdev;
	pf->id = ida_alloc(&pf_ida, GFP_KERNEL);
	if (pf->id < 0) {
		err = pf->id;
		kfree(pf);
		return err;
	}
	INIT_LIST_HEAD(&pf->sfs);
	knobs_default(&pf->knobs);
	pf->swid.id_len = 8;
	get_random_bytes(pf->swid.id, 8);
	pci_set_drvdata(pdev, pf);
	err = pci_enable_device(pdev);
	if (err)
		goto e_free;
	pci_set_master(pdev);
	pf->devlink = devlink_alloc(&dl_ops, sizeof(void *), &pdev->dev);
	if (!pf->devlink) {
		err = -ENOMEM;
		goto e_dis;
	}
	*(struct snic_pf **)devlink_priv(pf->devlink) = pf;
	devl_lock(pf->devlink);
	a.phys.port_number = pf->id;
	a.switch_id = pf->swid;
	devlink_port_attrs_set(&pf->port, &a);
	err = devl_port_register(pf->devlink, &pf->port, 0);
	if (err)
		goto e_dl;
	pf->hr = devl_health_reporter_create(pf->devlink, &hr_ops, 0, &pf->broken);
	pf->uplink = mknd(pf, NULL, UPLINK, &pdev->dev, &pf->port, NULL);
	if (IS_ERR(pf->uplink)) {
		err = PTR_ERR(pf->uplink);
		goto e_port;
	}
	for (i = 0; i < ARRAY_SIZE(pf_attrs); i++)
		device_create_file(&pdev->dev, pf_attrs[i]);
	devl_register(pf->devlink);
	devl_unlock(pf->devlink);
	return 0;
e_port:
	if (!IS_ERR_OR_NULL(pf->hr))
		devl_health_reporter_destroy(pf->hr);
	devl_port_unregister(&pf->port);
e_dl:
	devl_unlock(pf->devlink);
	devlink_free(pf->devlink);
e_dis:
	pci_disable_device(pdev);
e_free:
	ida_free(&pf_ida, pf->id);
	kfree(pf);
	return err;
}
static void snic_remove(struct pci_dev *pdev)
{
	struct snic_pf *pf;
	struct snic_fn *f, *t;
	int i;

	if (pdev->is_virtfn) {
		f = pci_get_drvdata(pdev);
		if (f->vdpa.device)
			vdpa_mgmtdev_unregister(&f->vdpa);
		cancel_delayed_work_sync(&f->born);
		mutex_lock(&rdma_lock);
		fn_rdma_del(f);
		mutex_unlock(&rdma_lock);
		rmnd(&f->dev);
		return;
	}
	pf = pci_get_drvdata(pdev);
	if (pf->nvfs)
		snic_sriov(pdev, 0);
	for (i = 0; i < ARRAY_SIZE(pf_attrs); i++)
		device_remove_file(&pdev->dev, pf_attrs[i]);
	devl_lock(pf->devlink);
	devl_unregister(pf->devlink);
	list_for_each_entry_safe(f, t, &pf->sfs, list)
		sf_destroy(f);
	unregister_netdev(pf->uplink);
	free_netdev(pf->uplink);
	if (!IS_ERR_OR_NULL(pf->hr))
		devl_health_reporter_destroy(pf->hr);
	devl_port_unregister(&pf->port);
	devl_unlock(pf->devlink);
	devlink_free(pf->devlink);
	pci_disable_device(pdev);
	ida_free(&pf_ida, pf->id);
	kfree(pf);
}
static const struct pci_device_id ids[] = { { PCI_DEVICE(0x8086, 0x10c9) }, { PCI_DEVICE(0x8086, 0x10ca) }, { } };
MODULE_DEVICE_TABLE(pci, ids);
static struct pci_driver drv = {
	.name = "simnic", .id_table = ids, .probe = snic_probe, .remove = snic_remove, .sriov_configure = snic_sriov,
};
static int __init snic_init(void)
{
	int err;

	snprintf(sf_ids[0].name, sizeof(sf_ids[0].name), "%s.sf", auxprefix);
	err = auxiliary_driver_register(&sf_drv);
	if (err)
		return err;
	err = pci_register_driver(&drv);
	if (err)
		auxiliary_driver_unregister(&sf_drv);
	return err;
}
static void __exit snic_exit(void)
{
	pci_unregister_driver(&drv);
	auxiliary_driver_unregister(&sf_drv);
}
module_init(snic_init);
module_exit(snic_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("software eswitch NIC for tests");
