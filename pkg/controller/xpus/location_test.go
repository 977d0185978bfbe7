// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

func TestLocate(t *testing.T) {
	node := func(name string, pfs ...v1alpha1.XPUNodePF) v1alpha1.XPUNode {
		return v1alpha1.XPUNode{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1alpha1.XPUNodeStatus{PFs: pfs},
		}
	}

	pf := func(address, serial, mac string) v1alpha1.XPUNodePF {
		return v1alpha1.XPUNodePF{
			Address: address, Serial: serial, MAC: mac, VFOffset: 2, VFStride: 1, TotalVFs: 16,
		}
	}

	at := func(address, name string) v1alpha1.XPUPF {
		return v1alpha1.XPUPF{Address: address, Name: name, VFOffset: 2, VFStride: 1, TotalVFs: 16}
	}
	bySerial := []opi.HostPF{{Name: "c1pf0", Serial: "MT1"}, {Name: "c1pf1", Serial: "MT1"}}
	byMAC := []opi.HostPF{
		{Name: "c1pf0", MAC: "02:00:00:00:00:01"}, {Name: "c1pf1", MAC: "02:00:00:00:00:02"},
	}
	one := node("node1", pf("0000:3b:00.1", "MT1", ""), pf("0000:3b:00.0", "MT1", ""),
		pf("0000:5e:00.0", "MT2", ""))
	swapped := node("node1", pf("0000:3b:00.0", "", "02:00:00:00:00:02"),
		pf("0000:3b:00.1", "", "02:00:00:00:00:01"))
	both := []v1alpha1.XPUPF{at("0000:3b:00.0", "c1pf0"), at("0000:3b:00.1", "c1pf1")}
	for what, test := range map[string]struct {
		spec     v1alpha1.XPUSpec
		had      v1alpha1.XPUStatus
		reported []opi.HostPF
		nodes    []v1alpha1.XPUNode
		want     location
	}{
		"by serial number": {reported: bySerial, nodes: []v1alpha1.XPUNode{one}, want: location{
			node: "node1", serial: "MT1", pfs: both, reason: "Found", message: "node node1 has " +
				"the card: PF 0000:3b:00.0 is c1pf0, PF 0000:3b:00.1 is c1pf1",
		}},
		"by MAC address, which the number does not contradict": {reported: byMAC,
			nodes: []v1alpha1.XPUNode{swapped}, want: location{
				node: "node1", pfs: []v1alpha1.XPUPF{
					at("0000:3b:00.0", "c1pf1"), at("0000:3b:00.1", "c1pf0"),
				}, reason: "Found",
				message: "node node1 has the card: PF 0000:3b:00.0 is c1pf1",
			}},
		"one card, another PF's MAC address": {
			reported: []opi.HostPF{{Name: "c1pf0", Serial: "MT1", MAC: "02:00:00:00:00:09"}},
			nodes: []v1alpha1.XPUNode{
				node("node1", pf("0000:3b:00.0", "MT1", "02:00:00:00:00:01")),
			},
			want: location{serial: "MT1", reason: "CardNotFound",
				message: "no node has reported a PF that is c1pf0 hw_addr 02:00:00:00:00:09 " +
					"serial MT1 yet"},
		},
		"as the spec says": {spec: v1alpha1.XPUSpec{
			NodeName: "node1", PFs: []string{"0000:3b:00.1"},
		}, reported: bySerial, nodes: []v1alpha1.XPUNode{one},
			want: location{node: "node1", serial: "MT1", pfs: both, reason: "Found"}},
		"another node than in the spec": {spec: v1alpha1.XPUSpec{NodeName: "node2"}, reported: bySerial,
			nodes: []v1alpha1.XPUNode{one},
			want: location{node: "node2", serial: "MT1", reason: "Contradiction",
				message: "spec.nodeName is node2, but node1 has a PF that is c1pf0 serial MT1"}},
		"another PF than in the spec": {spec: v1alpha1.XPUSpec{PFs: []string{"0000:5e:00.0"}},
			reported: bySerial, nodes: []v1alpha1.XPUNode{one},
			want: location{node: "node1", serial: "MT1", pfs: both, reason: "Contradiction",
				message: "spec.pfs has 0000:5e:00.0, which the OPI agent does not serve"}},
		"the node of the spec has not told": {spec: v1alpha1.XPUSpec{NodeName: "node1"},
			reported: bySerial,
			want: location{
				node: "node1", serial: "MT1", reason: "CardNotFound",
				message: "node node1 does not have a PF that is",
			}},
		"two nodes have it": {reported: bySerial, nodes: []v1alpha1.XPUNode{
			one, node("node0", one.Status.PFs...),
		},
			want: location{
				serial: "MT1", reason: "Contradiction", message: "nodes node0, node1 all have",
			}},
		"two nodes, one of which had it": {had: v1alpha1.XPUStatus{NodeName: "node1", PFs: both},
			reported: bySerial,
			nodes:    []v1alpha1.XPUNode{node("node0", one.Status.PFs...), one},
			want: location{node: "node1", serial: "MT1", pfs: both,
				reason: "Contradiction", message: "nodes node0, node1 all have a PF that is " +
					"c1pf0 serial MT1 or c1pf1 serial MT1; node node1 keeps the card"}},
		"two nodes, none of which had it": {had: v1alpha1.XPUStatus{NodeName: "node2", PFs: both},
			reported: bySerial,
			nodes:    []v1alpha1.XPUNode{node("node0", one.Status.PFs...), one}, want: location{
				serial: "MT1", reason: "Contradiction", message: "nodes node0, node1 all have",
			}},
		"one node, which had not": {had: v1alpha1.XPUStatus{NodeName: "node2", PFs: both},
			reported: bySerial,
			nodes:    []v1alpha1.XPUNode{one},
			want:     location{node: "node1", serial: "MT1", pfs: both, reason: "Found"}},
		"two nodes, and the spec says which": {spec: v1alpha1.XPUSpec{NodeName: "node1"},
			reported: bySerial,
			nodes:    []v1alpha1.XPUNode{one, node("node0", one.Status.PFs...)},
			want:     location{node: "node1", serial: "MT1", pfs: both, reason: "Found"}},
		"an agent that does not tell any more": {
			had: v1alpha1.XPUStatus{
				NodeName: "node1", Serial: "MT1", PFs: both,
				Conditions: []metav1.Condition{{Type: "Card", ObservedGeneration: 2}},
			},
			nodes: []v1alpha1.XPUNode{one},
			want: location{node: "node1", serial: "MT1", pfs: both, reason: "NotTold",
				message: "node1 keeps the card"}},
		"an agent that does not tell, after the spec was changed": {
			had: v1alpha1.XPUStatus{
				NodeName: "node1", Serial: "MT1", PFs: both,
				Conditions: []metav1.Condition{{Type: "Card", ObservedGeneration: 1}},
			},
			want: location{reason: "NotTold", message: "set spec.nodeName"}},
		"an agent that does not tell": {
			spec: v1alpha1.XPUSpec{NodeName: "node1"}, nodes: []v1alpha1.XPUNode{one},
			want: location{node: "node1"},
		},
		"nobody tells, nor does the spec": {
			want: location{reason: "NotTold", message: "set spec.nodeName"},
		},
		"what an agent leaves out is nobody's": {reported: []opi.HostPF{{Name: "c1pf0"}},
			nodes: []v1alpha1.XPUNode{node("node1", pf("0000:3b:00.0", "", ""))},
			want:  location{reason: "CardNotFound"}},
	} {
		got := locate(&v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Generation: 2}, Spec: test.spec,
			Status: test.had}, test.reported, test.nodes)
		if !strings.Contains(got.message, test.want.message) {
			t.Errorf("%s: message %q, want %q", what, got.message, test.want.message)
		}

		got.message = test.want.message
		if diff := gocmp.Diff(test.want, got, gocmp.AllowUnexported(location{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
}

func TestNumbered(t *testing.T) {
	pf := func(address string, vfs int32) v1alpha1.XPUNodePF {
		return v1alpha1.XPUNodePF{Address: address, VFOffset: 16, VFStride: 1, TotalVFs: vfs}
	}
	at := func(address, name string) v1alpha1.XPUPF {
		return v1alpha1.XPUPF{
			Address: address, Name: name, VFOffset: 16, VFStride: 1, TotalVFs: 8,
		}
	}
	has := []v1alpha1.XPUNodePF{
		pf("0000:3b:00.1", 8), pf("0000:3b:00.0", 8), pf("0000:5e:00.0", 0),
	}

	for what, test := range map[string]struct {
		wanted []string
		want   []v1alpha1.XPUPF
	}{
		"all with VFs": {nil, []v1alpha1.XPUPF{
			at("0000:3b:00.0", "pf0"), at("0000:3b:00.1", "pf1"),
		}},
		"one of the spec":       {[]string{"0000:3b:00.1"}, []v1alpha1.XPUPF{at("0000:3b:00.1", "pf1")}},
		"one that has no VFs":   {[]string{"0000:5e:00.0"}, nil},
		"one of another node's": {[]string{"0000:af:00.0"}, nil},
	} {
		if diff := gocmp.Diff(test.want, numbered(has, test.wanted)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
}

func TestPermanentMAC(t *testing.T) {
	const one, two = "00:11:22:33:44:01", "00:11:22:33:44:02"
	pfs := []v1alpha1.XPUNodePF{
		{
			Address: "0000:3b:00.0", VFOffset: 16, VFStride: 1, TotalVFs: 4,
			VFMACs: []string{one, "", "lies", two, one},
		},
		{
			Address: "0000:5e:00.0", VFOffset: 16, VFStride: 1, TotalVFs: 4,
			VFMACs: []string{two, "00:11:22:33:44:03"},
		},
	}

	for address, want := range map[pci.Address]string{
		"0000:3b:02.0": "",                  // two VFs have it, one of them beyond TotalVFs
		"0000:3b:02.1": "",                  // not known
		"0000:3b:02.2": "",                  // no address
		"0000:3b:02.3": "",                  // two PFs' VFs have it
		"0000:5e:02.1": "00:11:22:33:44:03", // its own
		"0000:5e:02.2": "",                  // beyond the list
		"0000:3b:00.0": "",                  // a PF
		"0000:af:02.0": "",                  // of no PF
	} {
		if got := permanentMAC(pfs, function.ID{Address: address}); got != want {
			t.Errorf("%s: %q, want %q", address, got, want)
		}
	}
	if got := permanentMAC(pfs, function.SubfunctionID("0000:5e:02.1", 1)); got != "" {
		t.Errorf("an SF has the address %q of its PF's VF", got)
	}
}
