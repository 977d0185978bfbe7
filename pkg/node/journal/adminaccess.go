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

// AdminAccess is a claim that may see Functions of the node without having them (adminAccess). It
// is stored because the kubelet lists these Functions like devices that the claim's pods have.
type AdminAccess struct {
	Namespace string        `json:"namespace"` // of the claim
	Name      string        `json:"name"`
	Functions []function.ID `json:"functions"`
}

// PutAdminAccess writes which Functions a claim sees. It replaces an earlier record of the claim.
func (j *Journal) PutAdminAccess(claim types.UID, s AdminAccess) error {
	j.mutex.RLock()
	same := reflect.DeepEqual(j.adminAccess[claim], s)
	j.mutex.RUnlock()
	if same {
		return nil
	}

	value, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("journal: adminAccess of claim %s/%s: %w", s.Namespace, s.Name, err)
	}

	return j.changeAdminAccess(claim, func(tx *boltfile.Tx) error {
		return tx.Put(adminAccessBucket, []byte(claim), value)
	}, func() { j.adminAccess[claim] = s })
}

// DeleteAdminAccess deletes the record of a claim, if there is one.
func (j *Journal) DeleteAdminAccess(claim types.UID) error {
	j.mutex.RLock()
	_, exists := j.adminAccess[claim]
	j.mutex.RUnlock()
	if !exists {
		return nil
	}
	return j.changeAdminAccess(claim, func(tx *boltfile.Tx) error {
		return tx.Delete(adminAccessBucket, []byte(claim))
	}, func() { delete(j.adminAccess, claim) })
}

func (j *Journal) changeAdminAccess(
	claim types.UID, toDisk func(*boltfile.Tx) error, toMemory func(),
) error {
	j.writes.Lock()
	defer j.writes.Unlock()

	if err := j.file.Update(toDisk); err != nil {
		return fmt.Errorf("journal: adminAccess of claim %s: %w", claim, err)
	}

	j.mutex.Lock()
	defer j.mutex.Unlock()

	toMemory()
	return nil
}

// Claims returns the claims that have Functions or see Functions, in any order. A claim with
// several Functions is there several times.
func (j *Journal) Claims() []Claim {
	j.mutex.RLock()
	defer j.mutex.RUnlock()

	var claims []Claim
	for _, a := range j.attachments {
		if a.Claim.UID != "" {
			claims = append(claims, a.Claim)
		}
	}

	for uid, s := range j.adminAccess {
		claims = append(claims, Claim{Namespace: s.Namespace, Name: s.Name, UID: uid})
	}

	return claims
}

// HasAdminAccess reports whether the claim sees the Function without having it.
func (j *Journal) HasAdminAccess(namespace, claim string, f function.ID) bool {
	j.mutex.RLock()
	defer j.mutex.RUnlock()
	for _, s := range j.adminAccess {
		if s.Namespace == namespace && s.Name == claim && slices.Contains(s.Functions, f) {
			return true
		}
	}
	return false
}
