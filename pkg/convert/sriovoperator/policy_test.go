// SPDX-License-Identifier: Apache-2.0

package sriovoperator_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/convert/sriovoperator"
)

// TestPolicyOfInfiniBand checks that a pool of InfiniBand VFs allows what networks of ib-sriov-cni
// can set, and no more.
func TestPolicyOfInfiniBand(t *testing.T) {
	for _, linkType := range []string{"ib", "IB"} {
		policy := fmt.Sprintf(`
apiVersion: sriovnetwork.openshift.io/v1
kind: SriovNetworkNodePolicy
metadata: {name: ib}
spec: {resourceName: ib, numVfs: 8, linkType: %s, nicSelector: {pfNames: [ib0]}}
`, linkType)
		pool, _, err := sriovoperator.Policy([]byte(policy), sriovoperator.DefaultPrefix)
		if err != nil {
			t.Fatal(err)
		}

		want := []v1alpha1.PrivilegedField{
			v1alpha1.FieldLinkState, v1alpha1.FieldNodeGUID, v1alpha1.FieldPortGUID,
		}
		if diff := cmp.Diff(want, pool.Spec.Allow); diff != "" {
			t.Errorf("allow (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([]string{"infiniband"}, pool.Spec.Selectors[0].LinkTypes); diff != "" {
			t.Errorf("linkTypes (-want +got):\n%s", diff)
		}
	}
}
