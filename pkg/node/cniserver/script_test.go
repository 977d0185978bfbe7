// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	cniversion "github.com/containernetworking/cni/pkg/version"
	"rsc.io/script"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/cni"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/scripted"
)

func TestMain(m *testing.M) { scripted.Main(m, shim) }

// shim is the shim of the script's agent. Its arguments are a CNI command and more variables.
func shim() {
	for _, variable := range append([]string{"CNI_COMMAND=" + os.Args[1]}, os.Args[2:]...) {
		key, value, _ := strings.Cut(variable, "=")
		os.Setenv(key, value)
	}

	paths := cni.Paths{Socket: os.Getenv("SOCKET"), SpoolDir: os.Getenv("SPOOL")}
	plugin := cni.Plugin{
		DeviceInfoDir: "/devinfo", Paths: func() (cni.Paths, error) { return paths, nil },
		Stdout: os.Stdout, Stderr: os.Stderr, Now: time.Now,
	}
	skel.PluginMainFuncs(plugin.Funcs(), cniversion.All, "xpu-cni")
}

// TestScripts runs testdata/*.txtar: what the shim prints, with an agent whose node is a card. The
// scripts have the commands of package scripted, and:
//
//	agent FILE                 starts the agent; FILE has the card's Function, its DevicePool, and
//	                           the record that the journal has before each case
//	cni COMMAND [VARIABLE=VALUE...] [< FILE]    runs the shim with a network configuration
//	attached FILE CASES        runs the shim for each case: the words for cni, and members that
//	                           replace or extend the configuration in FILE. It prints the cases,
//	                           each with its error or what was attached, which it deletes.
//	results FILE CASES         is like attached, and prints results
func TestScripts(t *testing.T) {
	scripted.Run(t, "cni", func(t *testing.T, shim scripted.Program) map[string]script.Cmd {
		r := &scriptRun{t: t, shim: shim}
		command := func(run func(*script.State, []string) (string, error)) script.Cmd {
			usage := script.CmdUsage{Summary: "see TestScripts", Args: "file [cases]"}
			return script.Command(usage, func(
				s *script.State, args ...string,
			) (script.WaitFunc, error) {
				out, err := run(s, args)
				return func(*script.State) (string, string, error) { return out, "", nil }, err
			})
		}
		return map[string]script.Cmd{
			"agent": command(r.agent), "attached": command(r.cases(attached)),
			"results": command(r.cases(nil)),
		}
	})
}

// scriptRun is a run of a script.
type scriptRun struct {
	t    *testing.T
	shim scripted.Program
	card *card
	node struct {
		Function *function.Function
		Pool     v1alpha1.DevicePoolSpec
		Record   *journal.Attachment
	}
}

func (r *scriptRun) agent(s *script.State, args []string) (string, error) {
	c, server := newCard(r.t)
	r.card, r.node.Function, r.node.Record = c, &c.function, nil
	text, err := os.ReadFile(s.Path(args[0]))
	if err == nil {
		err = yaml.UnmarshalStrict(text, &r.node)
	}
	if err != nil {
		return "", err
	}

	server.Pools = withSetup{pool.Pool{
		Name: "fast", Functions: []function.Function{c.function}, Spec: r.node.Pool,
	}, true}
	server.Auxiliary = func(name string) (function.ID, bool) {
		return c.function.ID, name == c.function.AuxDevice
	}
	server.AllowKeys, server.Ready = []string{"ourNote"}, func() error { return nil }
	server.Path, server.SpoolDir = filepath.Join(must.SocketDir(r.t), "s"), s.Path("spool")
	r.t.Cleanup(must.Run(r.t, server.Run))
	must.Eventually(r.t, "the agent listens", func() bool {
		_, err := os.Stat(server.Path)
		return err == nil
	})

	return "", s.Setenv("SOCKET", server.Path)
}

// cases runs the shim for each case. show returns what to print of the record of an attached
// Function; if it is nil, the result is printed.
func (r *scriptRun) cases(
	show func(journal.Attachment) any,
) func(*script.State, []string) (string, error) {
	return func(s *script.State, args []string) (string, error) {
		network, err := os.ReadFile(s.Path(args[0]))
		if err != nil {
			return "", err
		}
		cases, err := os.ReadFile(s.Path(args[1]))
		if err != nil {
			return "", err
		}

		var out strings.Builder
		for line := range strings.Lines(string(cases)) {
			if strings.HasPrefix(line, "\t") {
				continue // the outcome that is expected
			}

			out.WriteString(line)
			words, members, isCase := strings.Cut(strings.TrimSpace(line), "{")
			if !isCase {
				continue
			}

			config := map[string]json.RawMessage{}
			err := errors.Join(json.Unmarshal(network, &config),
				json.Unmarshal([]byte("{"+members), &config))
			outcome := ""
			if err == nil {
				outcome, err = r.outcome(s, strings.Fields(words), config, show)
			}
			if err != nil {
				return "", fmt.Errorf("%s: %w", line, err)
			}
			fmt.Fprintf(&out, "\t%s\n", strings.ReplaceAll(outcome, "\n", "\n\t"))
		}
		return out.String(), nil
	}
}

// outcome runs the shim. It returns the code and the text of the error, or the result, or what the
// agent attached, which it deletes.
func (r *scriptRun) outcome(
	s *script.State, words []string, config map[string]json.RawMessage,
	show func(journal.Attachment) any,
) (string, error) {
	input, err := json.Marshal(config)
	if err == nil && r.node.Record != nil {
		err = r.card.Put(*r.node.Record)
	}
	if err != nil {
		return "", err
	}

	before := r.card.All()
	stdout, _, err := r.shim(s, words, input)
	after := r.card.All()
	if err != nil {
		var said types.Error
		if err := json.Unmarshal([]byte(stdout), &said); err != nil {
			return "", fmt.Errorf("%q: %w", stdout, err)
		}
		if !reflect.DeepEqual(after, before) {
			return "", fmt.Errorf("%w, but the journal changed to %+v", &said, after)
		}
		return fmt.Sprint(said.Code, " ", said.Error()), nil
	}

	var shown any = json.RawMessage(stdout)
	switch {
	case words[0] != "ADD":
		return strings.TrimSpace("done " + stdout), nil
	case len(after) != 1 || after[0].State != journal.Attached ||
		after[0].Function != r.node.Function.ID:
		return "", fmt.Errorf("the agent has not attached the Function: %+v", after)
	case show != nil:
		shown = show(after[0])
	}

	text, err := json.Marshal(shown)
	if err != nil {
		return "", err
	}

	words[0] = "DEL"
	_, _, err = r.shim(s, words, input)
	return string(text), err
}

// attached returns what a script prints of the record of an attached Function.
func attached(a journal.Attachment) any {
	return struct {
		function.Interface
		Port     *journal.Port `json:"port,omitempty"`
		Resource string        `json:"resource,omitempty"`
		Pod      journal.Pod   `json:"pod,omitzero"`
	}{a.Interface, a.Port, a.Resource, a.Pod}
}
