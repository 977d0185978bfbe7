// SPDX-License-Identifier: Apache-2.0

package personality_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const good = `name: card
title: A card
pf: card
vf: cardvf
kernel: "6.12"
deviations:
  - does: resets the VF when its MAC is set
    play: {mac.reset: 100, mac.follow: reset}
    source: card_set_vf_mac in card.c
    answer: the VF is waited for
`

func TestParse(t *testing.T) {
	for name, c := range map[string]struct{ old, new, want string }{
		"unknown key": {"title:", "titel: x\ntitle:", "line 2: field titel not found"},
		"unknown key below": {
			"    source:", "    sorce: x\n    source:", "line 9: field sorce not found",
		},
		"unknown knob": {
			"mac.reset: 100", "mac.resets: 100", `line 8: knob "mac.resets" does not exist`,
		},
		"no value of a knob": {
			"mac.follow: reset", "mac.follow: later",
			`line 8: knob mac.follow: "later" must be one of`,
		},
		"too long": {
			"mac.reset: 100", "mac.reset: 60001", `knob mac.reset: "60001" is no ms`,
		},
		"knob twice": {"mac.follow: reset", "mac.reset: 1", "is set twice"},
		"no mapping of knobs": {
			"{mac.reset: 100, mac.follow: reset}", "[mac.reset]", "line 8: must be a mapping",
		},
		"no source": {
			"source: card_set_vf_mac in card.c", "source: ''", "source: must name what shows it",
		},
		"no answer": {
			"    answer: the VF is waited for\n", "", "must have either quirk or answer",
		},
		"name of a path": {"name: card", "name: ../card", "name: "},
		"two documents":  {good, good + "---\n" + good, "one document"},
		"nothing":        {good, "", "empty"},
		"too large":      {good, good + strings.Repeat("#", personality.MaxSize), "too many"},
	} {
		t.Run(name, func(t *testing.T) {
			text := strings.Replace(good, c.old, c.new, 1)
			_, err := personality.Parse([]byte(text))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one with %q", err, c.want)
			}
		})
	}
}

func TestScript(t *testing.T) {
	p, err := personality.Parse([]byte(good))
	must.Succeed(t, err)

	if got, want := p.Script(), "mac.reset=100\nmac.follow=reset\n"; got != want {
		t.Errorf("script %q, want %q", got, want)
	}
	if got := p.Value("mac.reset") + " " + p.Value("vlan.ad"); got != "100 EPROTONOSUPPORT" {
		t.Errorf("values %s", got)
	}
}

func TestAnswerOf(t *testing.T) {
	for err, want := range map[error]string{
		nil: "ok", unix.EOPNOTSUPP: "EOPNOTSUPP", unix.Errno(524): "ENOTSUPP",
		fmt.Errorf("set: %w", unix.EAGAIN): "EAGAIN",
		unix.EXDEV:                         "EIO", errors.New("other"): "EIO",
	} {
		if got := personality.AnswerOf(err); got != want {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(good))
	f.Add([]byte("deviations: [{play: {max.needs: 10000, speed: 10000}}]"))

	f.Fuzz(func(t *testing.T, content []byte) {
		p, err := personality.Parse(content)
		if err != nil {
			return
		}

		written, err := p.Marshal()
		must.Succeed(t, err)
		again, err := personality.Parse(written)
		must.Succeed(t, err)
		if diff := cmp.Diff(p, again); diff != "" {
			t.Errorf("written and read (-want +got):\n%s", diff)
		}
	})
}
