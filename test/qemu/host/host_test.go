// SPDX-License-Identifier: Apache-2.0

package host

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestFind(t *testing.T) {
	ports := t.TempDir()
	if _, err := find(ports); err == nil || !strings.Contains(err.Error(), PortName) {
		t.Errorf("no port: %v", err)
	}

	for port, name := range map[string]string{
		"vport0p1": "org.example.agent\n", "vport0p2": PortName + "\n",
	} {
		if err := os.Mkdir(filepath.Join(ports, port), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(ports, port, "name"), []byte(name),
			0o644); err != nil {
			t.Fatal(err)
		}
	}

	if got, err := find(ports); err != nil || got != "/dev/vport0p2" {
		t.Errorf("got %q, %v", got, err)
	}
}
