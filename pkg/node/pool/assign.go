// SPDX-License-Identifier: Apache-2.0

// Package pool decides which Functions of a node belong to which DevicePool.
package pool

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// Pool is the part of a DevicePool that this node has.
type Pool struct {
	// Name and Spec are the DevicePool's. Generation is the generation of the Spec; 0 for a
	// DevicePool from a file.
	Name       string
	Generation int64
	Spec       v1alpha1.DevicePoolSpec
	// Created is when the DevicePool was created; zero for a DevicePool from a file.
	Created time.Time
	// Functions has the Functions of the pool, in the order of the inventory. SFs of spec.sfs that
	// do not exist are [function.Function.Potential].
	Functions []function.Function
	// PFs has the existing PFs of the Functions, if the model has devices for PFs.
	PFs map[pci.Address]function.Function
	// Overlaps has Functions that the pool selects but another pool has: "0000:3b:00.2 in fast".
	Overlaps []string
	// Shortages has the PFs that cannot have the SFs that spec.sfs asks for.
	Shortages []v1alpha1.Shortage
	// Err says why the DevicePool cannot be used, because of its selectors or the name of its
	// resource. The pool is empty then.
	Err error
}

// ResourceName returns the name of the extended resource as which the device plugin offers the
// pool, or "" if it does not offer it.
func (p Pool) ResourceName() string { return p.Spec.ResourceName(p.Name) }

// Options says what a container gets besides the Function. The selector that matches the Function
// determines it.
type Options struct {
	// RDMA stands for the character devices of the RDMA devices (isRdma).
	RDMA bool
	// VDPA is "virtio" or "vhost" if the Function is used through its vDPA device (vdpaType),
	// otherwise "".
	VDPA string
}

// Options returns the options of the first selector that matches a Function of the pool. It ignores
// invalid selectors, because a pod may have got the Function while they were valid.
func (p Pool) Options(f function.Function) Options {
	for _, s := range p.Spec.Selectors {
		compiled, err := compile(s, p.Spec.DeviceType)
		if err == nil && (compiled.matches(f) || p.Makes(f.ID) && compiled.isPF(f)) {
			return compiled.options
		}
	}
	return Options{}
}

// NamesDriver reports whether a selector of the pool names the Function's driver, so that the pool
// is meant for Functions with this driver.
func (p Pool) NamesDriver(f function.Function) bool {
	return slices.ContainsFunc(p.Spec.Selectors, func(s v1alpha1.FunctionSelector) bool {
		return slices.ContainsFunc(s.Drivers, f.HasDriver)
	})
}

// ByPF returns the Functions of each PF in the order in which they are published: VFs before SFs,
// each sorted by index.
func (p Pool) ByPF() map[pci.Address][]function.Function {
	byPF := map[pci.Address][]function.Function{}
	for _, f := range p.Functions {
		byPF[f.PF] = append(byPF[f.PF], f)
	}

	for _, functions := range byPF {
		slices.SortFunc(functions, func(a, b function.Function) int {
			return cmp.Or(-cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Index, b.Index))
		})
	}

	return byPF
}

// Makes reports whether a Function of the pool is one of the SFs that are created when they are
// allocated (spec.sfs).
func (p Pool) Makes(id function.ID) bool {
	sfnum, isSF := id.SFNum()
	return isSF && p.Spec.SFs.Has(sfnum)
}

// NamedPFs returns the PFs of the node that the selectors name by pfNames or rootDevices, with any
// index. Of the other fields only vendors is compared, because a PF has the vendor of its VFs. All
// others describe the VFs.
func (p Pool) NamedPFs(functions []function.Function) []function.Function {
	selectors := p.selectors()
	var named []function.Function
	for _, f := range functions {
		if f.Kind == function.PF && slices.ContainsFunc(selectors, func(s selector) bool {
			return s.isPF(f)
		}) {
			named = append(named, f)
		}
	}

	return named
}

// Precedence orders pools that ask for the same: the one with the highest priority comes first, among
// these the oldest, and among these the one whose name sorts first.
func Precedence(a, b Pool) int {
	return cmp.Or(cmp.Compare(b.Spec.Priority, a.Spec.Priority), a.Created.Compare(b.Created),
		cmp.Compare(a.Name, b.Name))
}

// NoSFs returns why a PF with a driver cannot have SFs; nil if it can.
type NoSFs func(pf pci.Address) *v1alpha1.Shortage

// Assign assigns every Function to the DevicePool that selects it, and every resource name to the
// DevicePool that names it. If several do, the first one by [Precedence] gets it.
//
// Which Functions a DevicePool may select depends on its device type; see [v1alpha1.DeviceType].
// SFs that are created for a DevicePool (spec.sfs) belong to no DevicePool without spec.sfs. The
// result has an entry for every DevicePool whose nodeSelector matches the labels, sorted by name.
// If noSFs is nil, every PF with a driver can have SFs.
func Assign(
	functions []function.Function, devicePools []v1alpha1.DevicePool, nodeLabels map[string]string,
	noSFs NoSFs,
) []Pool {
	var pools []Pool
	for _, devicePool := range devicePools {
		if labels.SelectorFromSet(devicePool.Spec.NodeSelector).Matches(labels.Set(nodeLabels)) {
			pools = append(pools, Pool{
				Name: devicePool.Name, Generation: devicePool.Generation, Spec: devicePool.Spec,
				Created: devicePool.CreationTimestamp.Time,
			})
		}
	}
	slices.SortFunc(pools, Precedence)

	resources := map[string]string{}
	for i := range pools {
		p := &pools[i]
		if err := p.prepare(resources, functions); err != nil {
			p.Err = fmt.Errorf("DevicePool %s: %w", p.Name, err)
		}
	}

	// SFs that are created for a pool come first, so that creating or deleting them does not change
	// their pool.
	owners := map[function.ID]string{}
	for i := range pools {
		pools[i].fillSFs(functions, noSFs, owners)
	}

	made := maps.Clone(owners)
	for i := range pools {
		pools[i].fill(functions, owners, made)
	}

	for i := range pools {
		pools[i].findPFs(functions)
	}

	slices.SortFunc(pools, func(a, b Pool) int { return cmp.Compare(a.Name, b.Name) })
	return pools
}

// prepare checks the selectors and claims the resource name, if the pool has one. resources has the
// pool of each name.
func (p *Pool) prepare(resources map[string]string, functions []function.Function) error {
	if name := p.ResourceName(); name != "" {
		if err := CheckResourceName(name); err != nil {
			return err
		}
		if owner, taken := resources[name]; taken {
			return fmt.Errorf("spec.devicePlugin.resourceName: resource %s belongs to DevicePool "+
				"%s: must be another", name, owner)
		}
		resources[name] = p.Name
	}

	if _, err := compileAll(p.Spec); err != nil {
		return err
	}
	return checkAltNames(p.Spec, functions)
}

// selectors returns the compiled selectors of the pool; none if the pool cannot be used.
func (p Pool) selectors() []selector {
	if p.Err != nil {
		return nil
	}
	compiled, _ := compileAll(p.Spec) // prepare has checked them
	return compiled
}

// fillSFs gives the pool the SFs of spec.sfs on each PF that a selector names, whether they exist
// or not. If a PF cannot have SFs, the pool still gets those that exist, because a pod may have
// them.
func (p *Pool) fillSFs(functions []function.Function, noSFs NoSFs, owners map[function.ID]string) {
	if p.Spec.SFs == nil {
		return
	}

	existing := map[function.ID]function.Function{}
	for _, f := range functions {
		existing[f.ID] = f
	}

	for _, pf := range p.NamedPFs(functions) {
		if pf.Class == function.Accelerator {
			continue
		}

		shortage := shortageOf(pf, noSFs)
		if shortage != nil {
			p.Shortages = append(p.Shortages, *shortage)
		}

		first := uint32(p.Spec.SFs.FirstNumber)
		for sfnum := first; sfnum < first+uint32(p.Spec.SFs.Count); sfnum++ {
			f, exists := existing[function.SubfunctionID(pf.PF, sfnum)]
			switch {
			case !exists && shortage == nil:
				p.take(function.PotentialSF(pf, sfnum), owners)
			case exists && !f.DefaultRoute: // the node needs the default route itself
				p.take(f, owners)
			}
		}
	}
}

// shortageOf returns why no SFs can be made on the PF; nil if they can.
func shortageOf(pf function.Function, noSFs NoSFs) *v1alpha1.Shortage {
	if pf.Driver == "" {
		message := fmt.Sprintf("PF %s has no driver that could make SFs: bind it to the kernel's",
			pf.PF)
		return &v1alpha1.Shortage{
			PF: string(pf.PF), Reason: v1alpha1.ReasonNotSupported, Message: message,
		}
	}

	if noSFs == nil {
		return nil
	}

	return noSFs(pf.PF)
}

// fill gives the pool the Functions that it selects and that have no owner yet, except SFs that are
// created for a pool.
func (p *Pool) fill(functions []function.Function, owners, made map[function.ID]string) {
	selectors := p.selectors()
	for _, f := range functions {
		selects := func(s selector) bool { return s.matches(f) }
		if _, isMade := made[f.ID]; !isMade && eligible(f, p.Spec.DeviceType) &&
			slices.ContainsFunc(selectors, selects) {
			p.take(f, owners)
		}
	}

	if p.Spec.SFs != nil { // the SFs of fillSFs came first
		slices.SortFunc(p.Functions, func(a, b function.Function) int {
			return cmp.Or(cmp.Compare(a.ID.Address, b.ID.Address), cmp.Compare(a.Index, b.Index))
		})
	}
}

// findPFs finds the PFs of the pool's Functions.
func (p *Pool) findPFs(functions []function.Function) {
	if p.Spec.Model != v1alpha1.ModelCounters && p.Spec.Model != v1alpha1.ModelPorts {
		return
	}

	p.PFs = map[pci.Address]function.Function{}
	for _, f := range p.Functions {
		p.PFs[f.PF] = function.Function{}
	}

	for _, f := range functions {
		if _, wanted := p.PFs[f.ID.Address]; wanted && f.Kind == function.PF {
			p.PFs[f.PF] = f
		}
	}

	maps.DeleteFunc(p.PFs, func(_ pci.Address, f function.Function) bool { return f.Kind == "" })
}

// take gives the pool a Function, unless another pool has it.
func (p *Pool) take(f function.Function, owners map[function.ID]string) {
	if owner, taken := owners[f.ID]; taken {
		p.Overlaps = append(p.Overlaps, f.ID.String()+" in "+owner)
		return
	}
	owners[f.ID] = p.Name
	p.Functions = append(p.Functions, f)
}

// eligible reports whether pools of a device type may have the Function. No pool gets a Function
// that the node needs itself: the netdev of its default route, and PFs with VFs. If a device type
// is named, a driver must be bound, for an SF to its PF, as in sriov-network-device-plugin.
func eligible(f function.Function, deviceType v1alpha1.DeviceType) bool {
	if f.DefaultRoute || f.Kind == function.PF && f.NumVFs > 0 {
		return false
	}

	accelerator := f.Class == function.Accelerator
	switch deviceType {
	case "":
		return f.Kind != function.PF && !accelerator
	case v1alpha1.DeviceTypeNet:
		return f.Kind != function.SF && !accelerator && f.Driver != ""
	case v1alpha1.DeviceTypeAccelerator:
		return accelerator && f.Driver != ""
	case v1alpha1.DeviceTypeAuxNet:
		return f.Kind == function.SF && f.PFDriver != ""
	}

	return false
}
