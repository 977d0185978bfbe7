// SPDX-License-Identifier: Apache-2.0

package explain

import "regexp"

// wrappings are what kubelet, runtime and Multus put around the words of xpu-agent and xpu-cni. The
// texts are those of Kubernetes 1.34 to 1.37, containerd 1.7 and 2.2, CRI-O 1.34 and Multus 4.
var wrappings = regexp.MustCompile(`^(` +
	`Failed to create pod sandbox: ` +
	`|Failed to prepare dynamic resources: (prepare dynamic resources: )?` +
	`|NodePrepareResources failed for ResourceClaim [^ :]+: ` +
	`|rpc error: code = [A-Za-z]+ desc = ` +
	`|NRI RunPodSandbox failed: ` +
	`|failed to (setup network for sandbox|create pod network sandbox) [^:]+: ` +
	`|error adding pod \S+ to CNI network "[^"]+": ` +
	`|plugin type="multus(-shim)?" name="[^"]*" failed \(add\): ` +
	`|\[[^][]+\]: ` +
	`|error adding container to network "[^"]*": ` +
	`|Multus: ` +
	`|error loading k8s delegates k8s args: ` +
	`|TryLoadPodDelegates: error in getting k8s network for pod: ` +
	`|GetNetworkDelegates: failed getting the delegate: ` +
	`|getKubernetesDelegate: ` +
	`)`)

// plain returns a message without the wrappings around it.
func plain(message string) string {
	for {
		rest := message[len(wrappings.FindString(message)):]
		if rest == message || rest == "" {
			return message
		}
		message = rest
	}
}
