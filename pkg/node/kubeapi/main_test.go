package kubeapi_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
)

// cluster is the one API server of the package's tests, which use names of their own; nil if there is none.
var cluster *kubeapitest.Cluster

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	started, err := kubeapitest.Start(filepath.Join("..", "..", "..", "deploy"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	cluster = started
	code := m.Run()
	if err := cluster.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}
