// SPDX-License-Identifier: Apache-2.0

package kubeapi_test

import (
	"os"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
)

// cluster is the one API server of the package's tests, which use different names. It is nil
// without kube-apiserver.
var cluster *kubeapitest.Cluster

func TestMain(m *testing.M) {
	os.Exit(kubeapitest.Main(m, "../../../deploy", func(c *kubeapitest.Cluster) { cluster = c }))
}
