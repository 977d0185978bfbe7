// SPDX-License-Identifier: Apache-2.0

package mistakes

import "testing"

func TestTable(t *testing.T) {
	sections, err := All()
	if err != nil {
		t.Fatal(err)
	}

	rows, names := 0, map[string]bool{}
	for _, section := range sections {
		for _, row := range section.Rows {
			rows++
			if names[row.Mistake] {
				t.Errorf("%q is there twice", row.Mistake)
			}
			names[row.Mistake] = true
			if row.Manifest() == "" {
				t.Errorf("%q applies nothing", row.Mistake)
			}
		}
	}
	if rows < 50 {
		t.Errorf("there are %d mistakes, want at least 50", rows)
	}
}

func TestMissing(t *testing.T) {
	row := Row{Says: []string{"claim ...-nic-... is not Provisioned: create it (now)", "rc 1"}}
	const said = "pod a: claim web-nic-x2 is not Provisioned: create it (now)\nrc 1\n"
	if missing := row.Missing(said); missing != "" {
		t.Errorf("%q is missing", missing)
	}
	if missing := row.Missing("claim web\n-nic-x2 is not Provisioned: create it (now)"); missing == "" {
		t.Error("a sentence in two lines is taken for one")
	}
}
