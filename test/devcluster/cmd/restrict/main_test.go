// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestRaise(t *testing.T) {
	for given, want := range map[string]string{
		`{"process":{"oomScoreAdj":-997,"rlimits":[{"hard":18446744073709551615}]}}`: `{"process":{"oomScoreAdj":7,"rlimits":[{"hard":18446744073709551615}]}}`,
		`{"process": {"oomScoreAdj": 1000}}`:                                         `{"process": {"oomScoreAdj": 1000}}`,
		`{"process": {}}`:                                                            `{"process": {}}`,
	} {
		file := filepath.Join(t.TempDir(), "config.json")
		if err := os.WriteFile(file, []byte(given), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := raise(file, 7); err != nil {
			t.Error(err)
		}

		got, err := os.ReadFile(file)
		if err != nil || string(got) != want {
			t.Errorf("%s became %s, %v; want %s", given, got, err, want)
		}
	}
	for _, damaged := range []string{"", "{", "{}", `{"process": {"oomScoreAdj": 0.5}}`} {
		file := filepath.Join(t.TempDir(), "config.json")
		if err := os.WriteFile(file, []byte(damaged), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := raise(file, 7); err == nil {
			t.Errorf("%q: no error", damaged)
		}
	}
}
