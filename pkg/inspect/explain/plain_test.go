// SPDX-License-Identifier: Apache-2.0

package explain

import "testing"

func TestPlain(t *testing.T) {
	for message, want := range map[string]string{
		"Failed to create pod sandbox: rpc error: code = Unknown desc = NRI RunPodSandbox failed: " +
			"rpc error: code = Unknown desc = pod default/web uses the node's network": "pod " +
			"default/web uses the node's network",
		"Failed to create pod sandbox: rpc error: code = Unknown desc = failed to setup network for " +
			`sandbox "9540734dcfc9": plugin type="multus" name="multus" failed (add): ` +
			"[default/web/84dead91-89c7-433b-826a-36327be9c98b:yellow]: error adding container to " +
			`network "yellow": network configuration yellow: deviceID: is missing`: "network " +
			"configuration yellow: deviceID: is missing",
		"Failed to prepare dynamic resources: prepare dynamic resources: NodePrepareResources failed " +
			"for ResourceClaim net: claim default/net, request right: no": "claim default/net, request " +
			"right: no",
		`Multus: [default/web/1c0cbcf2]: error loading k8s delegates k8s args: TryLoadPodDelegates: ` +
			"error in getting k8s network for pod: GetNetworkDelegates: failed getting the delegate: " +
			"getKubernetesDelegate: cannot find a network-attachment-definition (bleu)": "cannot find a " +
			"network-attachment-definition (bleu)",
		"Allocate failed":                   "Allocate failed",
		"rpc error: code = Unknown desc = ": "rpc error: code = Unknown desc = ",
	} {
		if got := plain(message); got != want {
			t.Errorf("%q is %q, want %q", message, got, want)
		}
	}
}
