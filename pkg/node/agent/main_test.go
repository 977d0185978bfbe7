// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"os"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// cluster is the API server of the package's tests, nil if there is none.
var cluster *kubeapitest.Cluster

// TestMain runs the tests and the API server in a process with a network namespace of its own,
// because an agent's host is the namespace of its process.
func TestMain(m *testing.M) {
	os.Exit(netns.Main(func() int {
		if !netns.Isolated() {
			return m.Run()
		}
		return kubeapitest.Main(m, "../../../deploy", func(c *kubeapitest.Cluster) { cluster = c })
	}))
}
