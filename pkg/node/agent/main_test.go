package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// cluster is the API server of the package's tests, nil if there is none.
var cluster *kubeapitest.Cluster

// TestMain runs the tests, and the API server with them, in a process that has a network namespace of its own: an
// agent's host is the namespace of its process.
func TestMain(m *testing.M) {
	os.Exit(netns.Main(func() int { return run(m) }))
}

func run(m *testing.M) int {
	if netns.Isolated() {
		started, err := kubeapitest.Start(filepath.Join("..", "..", "..", "deploy"))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		cluster = started
	}
	code := m.Run()
	if err := cluster.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}
