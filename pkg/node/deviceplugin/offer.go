package deviceplugin

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/go-logr/logr"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// offer is what a resource has. It is never changed once it is made.
type offer struct {
	pool      pool.Pool
	functions map[string]function.Function // by the kubelet's device ID, which is [function.ID.String]
	devices   []*pluginapi.Device          // in the order of the pool
	problems  map[string]string            // what is wrong with the devices that are unhealthy
	returning map[string]bool              // those of them that are only on their way back from a pod
}

func newOffer(p pool.Pool, health Health) *offer {
	o := &offer{
		pool:      p,
		functions: make(map[string]function.Function, len(p.Functions)),
		devices:   make([]*pluginapi.Device, 0, len(p.Functions)),
		problems:  map[string]string{},
		returning: map[string]bool{},
	}
	topology := map[int]*pluginapi.TopologyInfo{} // many devices share few
	for _, f := range p.Functions {
		id := f.ID.String()
		o.functions[id] = f
		device := &pluginapi.Device{ID: id, Health: pluginapi.Healthy}
		if problems := health.Problems(f); len(problems) > 0 {
			messages := make([]string, 0, len(problems))
			for _, problem := range problems {
				messages = append(messages, problem.Message)
			}
			device.Health, o.problems[id] = pluginapi.Unhealthy, strings.Join(messages, "; ")
			o.returning[id] = len(problems) == 1 && problems[0].Taint == v1alpha1.TaintReleasePending
		}
		if f.NUMANode >= 0 && !devicePlugin(p).ExcludeTopology {
			if topology[f.NUMANode] == nil {
				topology[f.NUMANode] = &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: int64(f.NUMANode)}}}
			}
			device.Topology = topology[f.NUMANode]
		}
		o.devices = append(o.devices, device)
	}
	return o
}

// find returns the Functions with these device IDs, in this order.
func (o *offer) find(resource string, ids []string) ([]function.Function, error) {
	functions := make([]function.Function, 0, len(ids))
	seen := make(map[string]bool, len(ids))
	for _, id := range ids {
		f, ok := o.functions[id]
		if !ok {
			return nil, fmt.Errorf("device %q: resource %s has no such Function on this node", id, resource)
		}
		if seen[id] {
			return nil, fmt.Errorf("device %q is asked for twice", id)
		}
		seen[id] = true
		functions = append(functions, f)
	}
	return functions, nil
}

// some returns those Functions of these device IDs that there are.
func (o *offer) some(ids []string) []function.Function {
	functions := make([]function.Function, 0, len(ids))
	for _, id := range ids {
		if f, ok := o.functions[id]; ok {
			functions = append(functions, f)
		}
	}
	return functions
}

// sameDevices says whether the kubelet would see no difference.
func sameDevices(a, b []*pluginapi.Device) bool {
	return slices.EqualFunc(a, b, func(a, b *pluginapi.Device) bool {
		return a.ID == b.ID && a.Health == b.Health && numaNode(a) == numaNode(b)
	})
}

// numaNode is the device's, -1 where the kubelet is not told.
func numaNode(d *pluginapi.Device) int64 {
	if d.Topology == nil {
		return -1
	}
	return d.Topology.Nodes[0].ID
}

// maxLogged is how many Functions a line of the log names.
const maxLogged = 8

// report logs what became healthy or unhealthy, or came or went, since another offer of the resource: a line for each
// reason, as a PF takes all its VFs along.
func (o *offer) report(before *offer, log logr.Logger) {
	byReason := map[string][]string{}
	var healthy []string
	for _, d := range o.devices {
		reason, was := o.news(d.ID), before.news(d.ID)
		switch {
		case reason == was:
		case reason == "":
			healthy = append(healthy, d.ID)
		default:
			byReason[reason] = append(byReason[reason], d.ID)
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(byReason)) {
		ids := byReason[reason]
		log.Info("Functions are unhealthy", "count", len(ids), "functions", firstOf(ids), "reason", reason)
	}
	if len(healthy) > 0 {
		log.Info("Functions are healthy again", "count", len(healthy), "functions", firstOf(healthy))
	}
	if len(o.devices) != len(before.devices) {
		log.Info("Functions came or went", "before", len(before.devices), "now", len(o.devices))
	}
}

// news is why a device is unhealthy, "" where that is in the order of things: every pod's Function is on its way back
// for a moment, and whoever brings it back logs what goes wrong.
func (o *offer) news(id string) string {
	if o.returning[id] {
		return ""
	}
	return o.problems[id]
}

func firstOf(ids []string) string {
	if len(ids) <= maxLogged {
		return strings.Join(ids, " ")
	}
	return strings.Join(ids[:maxLogged], " ") + " .."
}
