// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/rdma"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// RDMA has the RDMA devices of a Function that go to the pod with it, where the RDMA system is in
// mode exclusive.
type RDMA struct {
	// Dir is the folder of the Function's device below the root of sysfs, such as
	// "bus/pci/devices/0000:3b:02.1". Its folder infiniband exists while the Function has an RDMA
	// device in any namespace. The folder lists only the RDMA devices in the host's namespace.
	Dir     string        `json:"dir"`
	Devices []rdma.Device `json:"devices"` // as they were on the host
}

// RDMANames names the RDMA devices of a Function on the host, and its folder as [RDMA.Dir] does.
type RDMANames struct {
	Dir   string
	Names []string
	// Nodes are the character devices that the pod's containers have been given already, such as
	// "uverbs1". It is nil if they get them after the attachment.
	Nodes []string
}

// rdmaSystem is the kernel's RDMA system, a [rdma.System]. Tests replace it.
type rdmaSystem interface {
	List(ns netns.NsHandle) ([]rdma.Device, error)
	Move(from netns.NsHandle, index uint32, to netns.NsHandle) error
	Rename(ns netns.NsHandle, index uint32, name string) error
	SetModeration(ns netns.NsHandle, index uint32, on bool) error
}

// planRDMA reads the RDMA devices on the host. It returns nil if none go to the pod.
func (e *Engine) planRDMA(named *RDMANames) (*RDMA, error) {
	if named == nil {
		return nil, nil
	}

	onHost, err := e.rdma.List(e.host.ns)
	if err != nil {
		return nil, err
	}

	before := &RDMA{Dir: named.Dir}
	for _, name := range named.Names {
		i := slices.IndexFunc(onHost, func(d rdma.Device) bool { return d.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("RDMA device %s: is not in the host's network namespace", name)
		}
		before.Devices = append(before.Devices, onHost[i])
	}

	return before, nil
}

// rdmaToPod moves the RDMA devices to the pod, after the netdev. So the addresses of the netdev are
// there when programs of the pod open the device. It reads back, and returns an error for a device
// that the pod does not have then. given are [RDMANames.Nodes].
func (e *Engine) rdmaToPod(pod *conn, before *RDMA, given []string) error {
	if before == nil {
		return nil
	}

	for _, d := range before.Devices {
		err := e.step("move RDMA device "+d.Name+" to pod", func() error {
			return e.rdma.Move(e.host.ns, d.Index, pod.ns)
		})
		if errors.Is(err, unix.EOPNOTSUPP) {
			return fmt.Errorf("%w: its driver cannot do that, so that the node must have its RDMA "+
				"system in mode shared (rdma system set netns shared)", err)
		}
		if err != nil {
			return err
		}
	}

	missing, err := e.missingRDMA(pod, before)
	switch {
	case err != nil:
		return err
	case len(missing) > 0:
		return fmt.Errorf("RDMA devices %s: are not in the pod after the move", names(missing))
	case given != nil:
		return e.checkNodes(before, given)
	}
	return nil
}

// checkNodes returns an error unless the RDMA devices have the character devices that containers
// were given. The kernel gives a device that moves the lowest free numbers.
func (e *Engine) checkNodes(before *RDMA, given []string) error {
	now, err := sysfs.Root(e.sysRoot).Dir(before.Dir).RDMANodes()
	if err != nil {
		return fmt.Errorf("device nodes of RDMA devices %s: %w", names(before.Devices), err)
	}
	if !slices.Equal(now, given) {
		return fmt.Errorf("RDMA devices %s: have other device nodes since they moved to the pod, "+
			"%s, and its containers were given %s: delete the pod; claims have no such problem",
			names(before.Devices), strings.Join(now, ", "), strings.Join(given, ", "))
	}
	return nil
}

// missingRDMA returns the devices that a namespace does not have.
func (e *Engine) missingRDMA(in *conn, before *RDMA) (missing []rdma.Device, err error) {
	there, err := e.rdma.List(in.ns)
	if err != nil {
		return nil, err
	}
	for _, d := range before.Devices {
		if !slices.ContainsFunc(there, d.Same) {
			missing = append(missing, d)
		}
	}
	return missing, nil
}

// checkRDMA returns a sentence for each RDMA device that the pod does not have.
func (e *Engine) checkRDMA(place Place, before *RDMA) (differences []string, err error) {
	if before == nil {
		return nil, nil
	}

	pod, err := e.dialPlace(place)
	if pod == nil || err != nil {
		return nil, err
	}
	defer pod.close()

	missing, err := e.missingRDMA(pod, before)
	for _, d := range missing {
		differences = append(differences, fmt.Sprintf("RDMA device %s is not in the pod", d.Name))
	}
	return differences, err
}

// errRDMAAway says that an RDMA device exists, and is in no namespace that can be found.
var errRDMAAway = errors.New("is in a network namespace that is not found; the kernel brings it " +
	"back when that ends")

// rdmaToHost moves the RDMA devices to the host, before the netdev. It looks for them everywhere,
// because a pod may have moved them on. If the pod's namespace has just ended, it waits a moment,
// because the kernel then brings the devices back itself.
//
// A device that does not exist any more is no error: the driver was bound again, or the card was
// reset.
func (e *Engine) rdmaToHost(ctx context.Context, p patience, place Place, before *RDMA) error {
	if before == nil {
		return nil
	}

	away := func(err error) bool { return errors.Is(err, errRDMAAway) }
	return p.atMost(e.settleTime).retry(ctx, away, func() error {
		missing, err := e.missingRDMA(e.host, before)
		if len(missing) == 0 || err != nil {
			return err
		}

		moveErr := e.fetchRDMA(ctx, place, missing)
		missing, err = e.awayRDMA(before)
		if len(missing) == 0 || err != nil {
			return errors.Join(err, moveErr)
		}

		return errors.Join(fmt.Errorf("RDMA devices %s: %w", names(missing), errRDMAAway), moveErr)
	})
}

// fetchRDMA moves RDMA devices to the host from the namespaces that have them. It looks in the
// namespace of the pod, in named namespaces, and in the namespaces of all processes.
func (e *Engine) fetchRDMA(ctx context.Context, place Place, missing []rdma.Device) error {
	paths := e.namespaces(place)
	if place.NetNS != "" {
		paths = slices.Insert(paths, 0, e.hostPath(place.NetNS))
	}

	var errs []error
	for _, path := range paths {
		if ctx.Err() != nil || len(missing) == 0 {
			break
		}

		var err error
		missing, err = e.fetchRDMAFrom(path, missing)
		errs = append(errs, err)
	}

	return errors.Join(errs...)
}

// fetchRDMAFrom moves RDMA devices to the host from the namespace at the path, and returns those
// that were not there. A path that is no namespace any more has none.
func (e *Engine) fetchRDMAFrom(path string, missing []rdma.Device) ([]rdma.Device, error) {
	ns, err := namespace.Open(path)
	if err != nil {
		return missing, nil
	}
	defer ns.Close()

	there, err := e.rdma.List(ns)
	if err != nil {
		return missing, fmt.Errorf("network namespace %s: %w", path, err)
	}

	var errs []error
	left := slices.DeleteFunc(slices.Clone(missing), func(d rdma.Device) bool {
		if !slices.ContainsFunc(there, d.Same) {
			return false
		}
		err := e.step("move RDMA device "+d.Name+" to host", func() error {
			return e.rdma.Move(ns, d.Index, e.host.ns)
		})
		errs = append(errs, err)
		return err == nil
	})

	return left, errors.Join(errs...)
}

// awayRDMA returns the devices that exist and that the host does not have.
//
// The folder infiniband of the Function's device says whether they exist, because the kernel removes
// it with the last RDMA device: see [RDMA.Dir]. If the folder lists as many devices as there were
// before, the driver has made new devices in place of the missing ones. A sysfs that shows no
// devices at all says nothing.
func (e *Engine) awayRDMA(before *RDMA) ([]rdma.Device, error) {
	missing, err := e.missingRDMA(e.host, before)
	if len(missing) == 0 || err != nil {
		return nil, err
	}

	root := sysfs.Root(e.sysRoot)
	made, exists, err := root.Dir(before.Dir, "infiniband").Names()
	if err == nil && !exists {
		_, err = root.Gone(root.Dir(before.Dir))
	}
	if err != nil {
		return nil, fmt.Errorf("RDMA devices %s: whether they exist: %w", names(missing), err)
	}
	if !exists || len(made) >= len(before.Devices) {
		return nil, nil
	}

	return missing, nil
}

// rdmaOnHost returns the devices of before as the host has them now. It returns an error if one of
// them exists elsewhere.
func (e *Engine) rdmaOnHost(before *RDMA) (*RDMA, error) {
	if before == nil {
		return nil, nil
	}

	away, err := e.awayRDMA(before)
	if err == nil && len(away) > 0 {
		err = fmt.Errorf("RDMA devices %s: %w", names(away), errRDMAAway)
	}
	if err != nil {
		return nil, err
	}
	there, err := e.rdma.List(e.host.ns)
	if err != nil {
		return nil, err
	}

	now := &RDMA{Dir: before.Dir}
	for _, d := range there {
		if slices.ContainsFunc(before.Devices, d.Same) {
			now.Devices = append(now.Devices, d)
		}
	}
	return now, nil
}

// undoRDMA restores the names and the moderation of RDMA devices on the host. It continues after a
// refusal. It returns the refusals by the names of the properties.
func (e *Engine) undoRDMA(before, now Snapshot) map[string]error {
	refused := map[string]error{}
	if before.RDMA == nil {
		return refused
	}

	differ := compare(Snapshot{RDMA: before.RDMA}, Snapshot{RDMA: now.RDMA})
	for _, p := range differ {
		refused[p.name] = e.step(fmt.Sprintf("%s %v", p.name, p.value), func() error {
			return e.changeRDMA(before.RDMA, p.name)
		})
	}

	return refused
}

// changeRDMA sets the property of a name to its value in before.
func (e *Engine) changeRDMA(before *RDMA, property string) error {
	for _, d := range before.Devices {
		switch property {
		case fmt.Sprint(rdmaName, d.Index):
			return e.rdma.Rename(e.host.ns, d.Index, d.Name)
		case fmt.Sprint(rdmaModeration, d.Index):
			return e.rdma.SetModeration(e.host.ns, d.Index, *d.Moderation)
		}
	}
	return nil
}

// Beginnings of the names of properties, which the index of the RDMA device completes.
const (
	rdmaName       = "RDMA name "
	rdmaModeration = "RDMA moderation "
)

// names returns the properties of the devices' names.
func (r *RDMA) names() (list []property) {
	if r == nil {
		return nil
	}
	for _, d := range r.Devices {
		list = append(list, property{name: fmt.Sprint(rdmaName, d.Index), value: d.Name})
	}
	return list
}

// moderations returns the properties of the devices' adaptive moderation.
func (r *RDMA) moderations() (list []property) {
	if r == nil {
		return nil
	}
	for _, d := range r.Devices {
		if d.Moderation != nil {
			name := fmt.Sprint(rdmaModeration, d.Index)
			list = append(list, property{name: name, value: onOff(d.Moderation)})
		}
	}
	return list
}

// renewed returns r for the devices that the driver has made in place of the old ones. A device of
// the same name is to get the moderation that the old one had.
func (r *RDMA) renewed(now *RDMA) *RDMA {
	if r == nil || now == nil {
		return now
	}

	made := &RDMA{Dir: now.Dir, Devices: slices.Clone(now.Devices)}
	for i, d := range made.Devices {
		for _, old := range r.Devices {
			if old.Name == d.Name {
				made.Devices[i].Moderation = old.Moderation
			}
		}
	}
	return made
}

// names returns the names of devices, for messages.
func names(devices []rdma.Device) string {
	var list []string
	for _, d := range devices {
		list = append(list, d.Name)
	}
	return strings.Join(list, ", ")
}
