// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// Sight is a claim that sees Functions of the node and does not have them (adminAccess). It is kept
// because the kubelet tells them like devices that the claim's pods have.
type Sight struct {
	Namespace string        `json:"namespace"` // of the claim
	Name      string        `json:"name"`
	Functions []function.ID `json:"functions"`
}

// PutSight writes down what a claim sees, in place of what it saw before.
func (j *Journal) PutSight(claim types.UID, s Sight) error {
	j.mutex.RLock()
	same := reflect.DeepEqual(j.sights[claim], s)
	j.mutex.RUnlock()
	if same {
		return nil
	}

	value, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("journal: sight of claim %s/%s: %w", s.Namespace, s.Name, err)
	}

	return j.changeSight(claim, func(tx *boltfile.Tx) error {
		return tx.Put(sightsBucket, []byte(claim), value)
	}, func() { j.sights[claim] = s })
}

// DeleteSight forgets what a claim sees, if it sees anything.
func (j *Journal) DeleteSight(claim types.UID) error {
	j.mutex.RLock()
	_, exists := j.sights[claim]
	j.mutex.RUnlock()
	if !exists {
		return nil
	}
	return j.changeSight(claim, func(tx *boltfile.Tx) error {
		return tx.Delete(sightsBucket, []byte(claim))
	}, func() { delete(j.sights, claim) })
}

func (j *Journal) changeSight(
	claim types.UID, toDisk func(*boltfile.Tx) error, toMemory func(),
) error {
	j.writes.Lock()
	defer j.writes.Unlock()

	if err := j.file.Update(toDisk); err != nil {
		return fmt.Errorf("journal: sight of claim %s: %w", claim, err)
	}

	j.mutex.Lock()
	defer j.mutex.Unlock()

	toMemory()
	return nil
}

// Sees says whether the claim sees the Function and does not have it.
func (j *Journal) Sees(namespace, claim string, f function.ID) bool {
	j.mutex.RLock()
	defer j.mutex.RUnlock()
	for _, s := range j.sights {
		if s.Namespace == namespace && s.Name == claim && slices.Contains(s.Functions, f) {
			return true
		}
	}
	return false
}
