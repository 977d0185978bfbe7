// SPDX-License-Identifier: Apache-2.0

package kubeapi_test

import (
	"os"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
)

// cluster is the one API server of the package's tests, which use names of their own; nil if there
// is none.
var cluster *kubeapitest.Cluster

func TestMain(m *testing.M) {
	os.Exit(kubeapitest.Main(m, "../../../deploy", func(c *kubeapitest.Cluster) { cluster = c }))
}
