// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"fmt"
	"maps"
	"strconv"

	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// PutVFs writes how many VFs a PF has before their number is changed. The kernel changes it by way
// of 0, and whoever finds the PF without VFs later knows from the record that it had some.
func (j *Journal) PutVFs(pf pci.Address, n int) error {
	return j.changeVFs(pf, func(tx *boltfile.Tx) error {
		return tx.Put(vfsBucket, []byte(pf), []byte(strconv.Itoa(n)))
	}, func() { j.vfs[pf] = n })
}

// DeleteVFs deletes the record of a PF, if there is one.
func (j *Journal) DeleteVFs(pf pci.Address) error {
	if _, exists := j.VFs()[pf]; !exists {
		return nil
	}
	return j.changeVFs(pf, func(tx *boltfile.Tx) error {
		return tx.Delete(vfsBucket, []byte(pf))
	}, func() { delete(j.vfs, pf) })
}

// VFs returns how many VFs PFs had before changes that were not finished.
func (j *Journal) VFs() map[pci.Address]int {
	j.mutex.RLock()
	defer j.mutex.RUnlock()
	return maps.Clone(j.vfs)
}

func (j *Journal) changeVFs(
	pf pci.Address, toDisk func(*boltfile.Tx) error, toMemory func(),
) error {
	j.writes.Lock()
	defer j.writes.Unlock()

	if err := j.file.Update(toDisk); err != nil {
		return fmt.Errorf("journal: VFs of PF %s: %w", pf, err)
	}

	j.mutex.Lock()
	defer j.mutex.Unlock()

	toMemory()
	return nil
}

func (j *Journal) loadVFs(key, value []byte) error {
	n, err := strconv.Atoi(string(value))
	if err != nil || n <= 0 {
		return fmt.Errorf("%w (VFs of PF %q: %q)", boltfile.ErrCorrupt, key, value)
	}
	j.vfs[pci.Address(key)] = n
	return nil
}
