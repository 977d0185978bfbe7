// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
)

// ruleProtocol says in lists of rules that this program added them (FRA_PROTOCOL). No routing daemon
// of include/uapi/linux/rtnetlink.h has this number.
const ruleProtocol = 88

// kernelRules returns the rules of the kernel for the rules of an interface. A rule without
// prefixes is one rule for each family.
func kernelRules(netdev string, rules []function.Rule) (list []*netlink.Rule) {
	for _, r := range rules {
		ipv4, ipv6 := r.Families()
		if ipv4 {
			list = append(list, kernelRule(netdev, r, netlink.FAMILY_V4))
		}
		if ipv6 {
			list = append(list, kernelRule(netdev, r, netlink.FAMILY_V6))
		}
	}
	return list
}

func kernelRule(netdev string, r function.Rule, family int) *netlink.Rule {
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Table = family, r.Priority, r.Table
	rule.Protocol = ruleProtocol

	if r.From.IsValid() {
		rule.Src = netaddr.ToIPNet(r.From)
	}
	if r.To.IsValid() {
		rule.Dst = netaddr.ToIPNet(r.To)
	}
	if r.Incoming {
		rule.IifName = netdev
	}
	if r.Outgoing {
		rule.OifName = netdev
	}

	return rule
}

// addRule adds a rule, unless the pod has it already.
func addRule(pod *conn, rule *netlink.Rule) error {
	err := pod.library(func(h *netlink.Handle) error { return h.RuleAdd(rule) })
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	if errors.Is(err, unix.EAFNOSUPPORT) && rule.Src == nil && rule.Dst == nil {
		return nil // the kernel has no IPv6, and the rule is for both families
	}
	return err
}

// dropRules removes the rules that the attachment added to the namespace. The namespace may not
// exist any more.
//
// It does not look for the rules first, because a pod may have any number of rules. The kernel
// deletes the first rule that has all given properties (rule_find of net/core/fib_rules.c), which
// can only be another rule of the same priority and table in the pod that is being left. A rule that
// stays is a note, because it affects nobody but this pod.
func (e *Engine) dropRules(pod *conn, remains *Remains) (notes []string) {
	if pod == nil || remains == nil {
		return nil
	}

	for _, rule := range kernelRules(remains.Interface, remains.Rules) {
		err := e.step("remove "+rule.String(), func() error {
			return pod.library(func(h *netlink.Handle) error { return h.RuleDel(rule) })
		})
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EAFNOSUPPORT) {
			notes = append(notes, fmt.Sprintf("%s stays in the pod: %v", rule, err))
		}
	}

	return notes
}
