// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
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

// ruleText describes a rule for messages.
func ruleText(r *netlink.Rule) string {
	family := "IPv4"
	if r.Family == netlink.FAMILY_V6 {
		family = "IPv6"
	}

	text := fmt.Sprintf("%s rule %d", family, r.Priority)
	for _, part := range []struct{ word, value string }{
		{"from", prefixText(r.Src)}, {"to", prefixText(r.Dst)}, {"iif", r.IifName}, {"oif", r.OifName},
	} {
		if part.value != "" {
			text += " " + part.word + " " + part.value
		}
	}

	return fmt.Sprintf("%s table %d", text, r.Table)
}

func prefixText(prefix *net.IPNet) string {
	if prefix == nil {
		return ""
	}
	return prefix.String()
}

// checkRules returns an error if the pod has a rule already that could be taken for one of the
// interface's. The rules of a bond may be there already, because its other port has added them.
// The kernel does not compare properties that a rule lacks (rule_find of net/core/fib_rules.c, and
// the compare functions of IPv4 and IPv6). Therefore a rule of the same priority and table is
// another one only if both are for different interfaces.
func checkRules(pod *conn, want function.Interface) error {
	if len(want.Rules) == 0 {
		return nil
	}

	wanted := kernelRules(want.Name, want.Rules)
	if want.Bond != nil {
		wanted = kernelRules(want.Bond.Name, want.Rules)
	}

	have, err := listRules(pod)
	if err != nil {
		return err
	}

	for _, rule := range wanted {
		for _, other := range have {
			isOfBond := want.Bond != nil && sameRule(rule, &other)
			if confused(rule, &other) && !isOfBond {
				return fmt.Errorf("the pod has %s already: give %s another priority", ruleText(&other),
					ruleText(rule))
			}
		}
	}

	return nil
}

func listRules(pod *conn) ([]netlink.Rule, error) {
	have, err := request.Consistent(func() (list []netlink.Rule, err error) {
		err = pod.library(func(h *netlink.Handle) error {
			list, err = h.RuleList(netlink.FAMILY_ALL)
			return err
		})
		return list, err
	})
	if err != nil {
		return nil, fmt.Errorf("list the rules of the pod: %w", err)
	}
	return have, nil
}

// missingRules lists the rules that the pod lacks. A rule for both families is not missing in a
// family of which the pod has no rules at all, because the kernel lacks such a family.
func missingRules(pod *conn, _ *link, a Attached) (d []string, err error) {
	if len(a.Want.Rules) == 0 {
		return nil, nil
	}

	have, err := listRules(pod)
	if err != nil {
		return nil, err
	}

	for _, rule := range kernelRules(a.Want.Name, a.Want.Rules) {
		isThere := func(other netlink.Rule) bool { return ruleText(&other) == ruleText(rule) }
		sameFamily := func(other netlink.Rule) bool { return other.Family == rule.Family }
		lacksFamily := rule.Src == nil && rule.Dst == nil && !slices.ContainsFunc(have, sameFamily)
		if !slices.ContainsFunc(have, isThere) && !lacksFamily {
			d = append(d, ruleText(rule)+" is missing")
		}
	}

	return d, nil
}

// confused reports whether a request for one of the rules may find the other one.
func confused(a, b *netlink.Rule) bool {
	apart := func(a, b string) bool { return a != "" && b != "" && a != b }
	return a.Family == b.Family && a.Priority == b.Priority && a.Table == b.Table &&
		!apart(a.IifName, b.IifName) && !apart(a.OifName, b.OifName)
}

// sameRule reports whether other is the rule, added by this program.
func sameRule(rule, other *netlink.Rule) bool {
	return ruleText(rule) == ruleText(other) && other.Protocol == ruleProtocol
}

// addRule adds a rule. A rule for both families is left out of the family that the kernel lacks.
func addRule(pod *conn, rule *netlink.Rule) error {
	err := pod.library(func(h *netlink.Handle) error { return h.RuleAdd(rule) })
	lacksIPv6 := rule.Family == netlink.FAMILY_V6 && errors.Is(err, unix.EAFNOSUPPORT)
	if lacksIPv6 && rule.Src == nil && rule.Dst == nil {
		return nil
	}
	return err
}

// addRuleOfBond adds a rule for a bond, unless its other port has added it.
func addRuleOfBond(pod *conn, rule *netlink.Rule) error {
	err := addRule(pod, rule)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}

	have, listErr := listRules(pod)
	isThere := func(other netlink.Rule) bool { return sameRule(rule, &other) }
	if slices.ContainsFunc(have, isThere) {
		return nil
	}

	return errors.Join(err, listErr)
}

// dropOwnRules removes the rules that the attachment added for the interface itself. The namespace
// may not exist any more. The rules of a bond stay until the bond goes.
func (e *Engine) dropOwnRules(pod *conn, remains *Remains) (notes []string) {
	if pod == nil || remains == nil || remains.Bond != nil {
		return nil
	}
	return e.dropRules(pod, remains.Interface, remains.Rules)
}

// dropRules removes rules that were added for a netdev.
//
// It does not look for the rules first, because a pod may have any number of rules by now. See
// [checkRules] for why the kernel finds no rule of another interface. A rule that stays is a note,
// because it affects nobody but this pod.
func (e *Engine) dropRules(
	pod *conn, netdev string, rules []function.Rule,
) (notes []string) {
	for _, rule := range kernelRules(netdev, rules) {
		err := e.step("remove "+ruleText(rule), func() error {
			return pod.library(func(h *netlink.Handle) error { return h.RuleDel(rule) })
		})
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EAFNOSUPPORT) {
			notes = append(notes, fmt.Sprintf("%s stays in the pod: %v", ruleText(rule), err))
		}
	}

	return notes
}
