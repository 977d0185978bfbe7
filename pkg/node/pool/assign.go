// SPDX-License-Identifier: Apache-2.0

// Package pool decides which Functions of a node belong to which DevicePool.
package pool

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// Pool is what one DevicePool has on this node.
type Pool struct {
	// Name and Spec are the DevicePool's. Generation is that of the Spec; 0 for one from a file.
	Name       string
	Generation int64
	Spec       v1alpha1.DevicePoolSpec
	// Functions are the Functions of the pool, in the order of the inventory. SFs of spec.sfs that
	// do not exist are [function.Function.Potential].
	Functions []function.Function
	// PFs are those of the Functions, as far as they exist, if the model has devices for PFs.
	PFs map[pci.Address]function.Function
	// Functions that the pool selects but that belong to another one, "0000:3b:00.2 in fast"
	Overlaps  []string
	Shortages []v1alpha1.Shortage // PFs that cannot have the SFs that spec.sfs asks for
	// Err says why the DevicePool cannot be used, because of its selectors or the name of its
	// resource; the pool is empty then.
	Err error
}

// ResourceName is the name of the extended resource as which the device plugin offers the pool, or
// "".
func (p Pool) ResourceName() string { return p.Spec.ResourceName(p.Name) }

// Options are what the container gets beside the Function. The selector that matches the Function
// asks for them.
type Options struct {
	RDMA bool // the character devices of the RDMA devices (isRdma)
	// "virtio" or "vhost" if the Function is used through its vDPA device (vdpaType), otherwise ""
	VDPA string
}

// Options returns what the first selector that matches one of the pool's Functions asks for. It
// ignores invalid selectors, as a pod may have the Function since the selectors were valid.
func (p Pool) Options(f function.Function) Options {
	for _, s := range p.Spec.Selectors {
		compiled, err := compile(s, p.Spec.DeviceType)
		if err == nil && (compiled.matches(f) || p.Makes(f.ID) && compiled.isPF(f)) {
			return compiled.options
		}
	}
	return Options{}
}

// NamesDriver says whether a selector of the pool names the driver: the pool is meant to have
// Functions with the driver.
func (p Pool) NamesDriver(driver string) bool {
	return slices.ContainsFunc(p.Spec.Selectors, func(s v1alpha1.FunctionSelector) bool {
		return slices.Contains(s.Drivers, driver)
	})
}

// ByPF returns the Functions of each PF in the order in which they are published: VFs before SFs,
// each by their index.
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

// Makes says whether the Function, which the pool has, is one of the SFs that are created when they
// are allocated (spec.sfs).
func (p Pool) Makes(id function.ID) bool {
	sfnum, isSF := id.SFNum()
	return isSF && p.Spec.SFs.Has(sfnum)
}

// NamedPFs are the PFs of the node that the selectors name by pfNames or rootDevices, with any
// index. Of the other fields only vendors is compared, as a PF has the vendor of its VFs. The rest
// describes the VFs.
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

// NoSFs says what keeps a PF that has a driver from having SFs; nil if nothing does.
type NoSFs func(pf pci.Address) *v1alpha1.Shortage

// Assign gives every Function to the DevicePool that selects it, and every resource name to the
// DevicePool that names it. Where several do, the one with the highest priority has it, of equals
// the oldest, and of those the one whose name sorts first. Which Functions a DevicePool may select
// at all depends on its device type; see [v1alpha1.DeviceType]. SFs that are created for a
// DevicePool (spec.sfs) are in no DevicePool without spec.sfs. The result has an entry for every
// DevicePool whose nodeSelector matches the labels, sorted by name. If noSFs is nil, every PF with
// a driver can have SFs.
func Assign(
	functions []function.Function, devicePools []v1alpha1.DevicePool, nodeLabels map[string]string,
	noSFs NoSFs,
) []Pool {
	sorted := slices.SortedFunc(slices.Values(devicePools), func(a, b v1alpha1.DevicePool) int {
		return cmp.Or(cmp.Compare(b.Spec.Priority, a.Spec.Priority),
			a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})

	resources := map[string]string{}
	var pools []Pool
	for _, devicePool := range sorted {
		if !labels.SelectorFromSet(devicePool.Spec.NodeSelector).Matches(labels.Set(nodeLabels)) {
			continue
		}
		p := Pool{Name: devicePool.Name, Generation: devicePool.Generation, Spec: devicePool.Spec}
		if err := p.prepare(resources); err != nil {
			p.Err = fmt.Errorf("DevicePool %s: %w", p.Name, err)
		}
		pools = append(pools, p)
	}

	// SFs that are created for a pool come first, so that they do not change the pool when they are
	// created or deleted.
	owners := map[function.ID]string{}
	for i := range pools {
		pools[i].fillMade(functions, noSFs, owners)
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

// prepare checks the selectors and takes the resource name, if the pool has one. resources has the
// pool of each name.
func (p *Pool) prepare(resources map[string]string) error {
	if name := p.ResourceName(); name != "" {
		if err := CheckResourceName(name); err != nil {
			return err
		}
		if owner, taken := resources[name]; taken {
			return fmt.Errorf("spec.devicePlugin.resourceName: resource %s is that of DevicePool "+
				"%s: must be another", name, owner)
		}
		resources[name] = p.Name
	}

	_, err := compileAll(p.Spec)
	return err
}

// selectors are the compiled selectors of the pool; none if the pool cannot be used.
func (p Pool) selectors() []selector {
	if p.Err != nil {
		return nil
	}
	compiled, _ := compileAll(p.Spec) // prepare has checked them
	return compiled
}

// fillMade gives the pool the SFs of spec.sfs, whether they exist or not, of each PF that a
// selector names. Of a PF that cannot have SFs it takes those that exist, as a pod may have them.
func (p *Pool) fillMade(functions []function.Function, noSFs NoSFs, owners map[function.ID]string) {
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
			case exists && !f.DefaultRoute: // which the node needs itself
				p.take(f, owners)
			}
		}
	}
}

// shortageOf says why no SFs can be made at the PF; nil if they can.
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

	if p.Spec.SFs != nil { // the made ones came first
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

// take gives the pool a Function, unless another one has it.
func (p *Pool) take(f function.Function, owners map[function.ID]string) {
	if owner, taken := owners[f.ID]; taken {
		p.Overlaps = append(p.Overlaps, f.ID.String()+" in "+owner)
		return
	}
	owners[f.ID] = p.Name
	p.Functions = append(p.Functions, f)
}

// eligible says whether pools of a device type may have the Function. No pool has what the node
// needs itself: the netdev of its default route, and PFs with VFs. If a device type is named, a
// driver must be bound, as sriov-network-device-plugin demands; for an SF, to its PF.
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
