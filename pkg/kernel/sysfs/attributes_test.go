// SPDX-License-Identifier: Apache-2.0

package sysfs_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestAttributes checks that several files are read as each of them is, and that a file that cannot
// be read does not prevent reading the others.
func TestAttributes(t *testing.T) {
	dir := t.TempDir()
	must.Succeed(t, os.Mkdir(filepath.Join(dir, "rx-0"), 0o700))

	for name, text := range map[string]string{
		"ifindex": "7\n", "empty": "", "rx-0/rps_cpus": " 00000000,0000000f \n",
		"long": strings.Repeat("a", 4097), "binary": "\xff",
	} {
		must.Succeed(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}

	texts, failed := sysfs.Dir(dir).Attributes("ifindex", "empty", "rx-0/rps_cpus", "long",
		"binary", "none")
	want := map[string]string{"ifindex": "7", "empty": "", "rx-0/rps_cpus": "00000000,0000000f"}
	if diff := cmp.Diff(want, texts); diff != "" {
		t.Errorf("texts (-want +got):\n%s", diff)
	}
	if len(failed) != 3 || !errors.Is(failed["none"], fs.ErrNotExist) {
		t.Errorf("failed %v", failed)
	}
	if texts, failed := sysfs.Dir(dir+"/none").Attributes("a", "b"); len(texts) != 0 ||
		len(failed) != 2 {
		t.Errorf("of no directory: %v, failed %v", texts, failed)
	}
}
